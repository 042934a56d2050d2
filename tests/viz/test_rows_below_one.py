"""Views of patterns whose rows do not sum to 1: other softmaxes, and hooks after the softmax."""

import re

import pytest
import torch

from dlm_lens import denoise
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import AttentionPattern, rerun
from dlm_lens.sinks import TopK
from dlm_lens.testing import tiny
from dlm_lens.viz import attention_heads, attention_maps
from dlm_lens.viz.attention_snapshot import snapshot

CASES = {
    "off-by-one softmax": ({"softmax": "off_by_one"}, []),
    "sink logits": ({"softmax": "sink_logits"}, []),
    "hook after the softmax": ({}, [mask_positions(3, stage="after")]),
    "rows that sum to 1": ({}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_figures_and_views_say_what_the_rows_sum_to(case):
    options, hooks = CASES[case]
    model = tiny("sink_qwen", **options)
    run = denoise(model, ["w1 w2 w3 w4 w5 w6"], steps=3, gen_length=8)
    figure = attention_maps(model, run, steps=[1], layer=0, head=0, hooks=hooks)
    (label,) = {axes.get_ylabel() for axes in figure.axes if "A_{ij}" in axes.get_ylabel()}
    view = attention_heads(run, model, step=1, layer=0, hooks=hooks)
    # The sums of the canvas's rows in a recorded pattern; a learned sink's own row is 1.
    sums = rerun(model, run, [AttentionPattern()], hooks=hooks, steps=[1], layers=[0]).pattern[0, 0, 0].sum(-1)
    low, high = float(sums[~sums.isnan()].min()), float(sums[~sums.isnan()].max())
    high = max(high, float(bool(model.config.num_sinks)))
    if case == "rows that sum to 1":
        assert "rows sum to 1;" in label
        assert "rows sum to 1" in view._repr_html_()
    else:
        assert low < 0.99
        assert re.search(rf"rows sum to {low:.2f} to {high:.2f};", label)
        assert f"rows sum to {low:.2f} to {high:.2f}" in view._repr_html_()
    # The sinks that are marked are those of the scores, whatever the rows sum to.
    shot = snapshot(model, run, step=1, layer=0, hooks=hooks)
    received = shot.pattern[0, : len(shot.positions)].double().sum(0)
    assert shot.sinks_of(TopK(1), 0) == [int(received.argmax())]
    assert torch.allclose(shot.received().column_sums[0, 0, 0, 0].double(), received, atol=1e-6)
