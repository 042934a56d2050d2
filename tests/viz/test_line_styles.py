"""Lines of a panel differ in dashes or marks, not in colour alone; what a legend names is drawn."""

from itertools import combinations

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import commitment, insertion_loss, remask
from dlm_lens.recording import FeatureActivations
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import PROMPTS, RUN, autoencoder
from tests.training.test_sink_probe import history


def settled(model):
    return dl.viz.commitment_map(commitment(model, dl.denoise(model, PROMPTS, **RUN)))


def remasked(model):
    return dl.viz.remask_spread(remask(model, PROMPTS, at=[2], **RUN))


def rates(model):
    recording = dl.record(model, PROMPTS, [FeatureActivations(autoencoder(model))], layers=[1], **RUN)
    return dl.viz.feature_rates(recording)


def inserted(model):
    return dl.viz.insertion_by_step(insertion_loss(model, dl.denoise(model, PROMPTS, **RUN), autoencoder(model)))


def trained(_):
    probe = {"sink/learned_norm_ratio": 0.5}
    return dl.viz.sink_emergence([entry | (probe if "sink/moved" in entry else {}) for entry in history()])


def regions(model):
    return dl.viz.region_mass(one_step(model), queries=("all", "masked", "unmasked", "prompt", "block"))


def one_step(model):
    return dl.record(model, PROMPTS[0], [dl.RegionMass()], steps=1, gen_length=8)


@pytest.mark.parametrize("draw", [settled, remasked, rates, inserted, trained, regions])
def test_named_lines_differ_without_colour(draw):
    panels = 0
    for axes in draw(tiny("llada")).axes:
        lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
        panels += len(lines) > 1
        for one, other in combinations(lines, 2):
            styles = [(line.get_linestyle(), line.get_marker()) for line in (one, other)]
            assert styles[0] != styles[1], (one.get_label(), other.get_label())
    assert panels


def test_one_step_shows_uniform_attention_and_classes_without_queries_have_no_name():
    recording = one_step(tiny("llada"))
    (even,) = [line for line in dl.viz.region_mass(recording).axes[0].get_lines() if line.get_gid() == "even"]
    assert even.get_marker() == "_"  # a line of one point shows nothing
    assert np.isfinite(even.get_ydata()).all()
    autoregressive = dl.record(tiny("causal"), PROMPTS, [dl.RegionMass()], gen_length=4)
    named = [text.get_text() for text in dl.viz.region_mass(autoregressive).legends[0].get_texts()]
    assert named == ["unmasked queries"]


def test_the_discount_of_a_long_canvas_fits_a_page():
    """3,000 positions made a picture of 330 inches."""
    run = dl.denoise(tiny("llada"), [[5] * 120], steps=2, gen_length=4)
    figure = dl.viz.sink_discount(torch.rand(run.unmasked.shape), run)
    assert figure.get_figheight() <= 12
