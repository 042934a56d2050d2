"""`feature_rates` and `insertion_by_step` draw the recorded counts and the measured losses."""

from dataclasses import replace

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.probes import insertion_loss
from dlm_lens.recording import FeatureActivations
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import PROMPTS, RUN, autoencoder


def test_captions_count_the_prompts_that_have_a_position():
    model = tiny("llada")
    sae = autoencoder(model)
    recording = dl.record(model, PROMPTS, [FeatureActivations(sae)], layers=[1], **RUN)
    loss = insertion_loss(model, recording.run, sae, places=["open"], nulls=[])
    assert dl.viz.feature_rates(recording, [3]).get_suptitle().endswith("n = 2 prompts")
    assert "n = 2 prompts" in dl.viz.insertion_by_step(loss).axes[0].get_title(loc="left")
    # Of a row that is over before a part of a run nothing is measured.
    recording.feature_positions[:, 1] = 0
    recording.feature_count[:, 1] = 0
    nothing = {name: getattr(loss, name).clone() for name in ("positions", "plain", "loss", "kl")}
    for values in nothing.values():
        values[..., 1] = 0
    loss = replace(loss, **nothing)
    assert loss.added(1).prompts == 1
    assert dl.viz.feature_rates(recording, [3]).get_suptitle().endswith("n = 1 prompt")
    assert dl.viz.insertion_by_step(loss).axes[0].get_title(loc="left").endswith("n = 1 prompt")  # no interval


def test_a_model_without_open_positions_shows_what_changes_most_at_decided_ones(recwarn):
    model = tiny("causal")
    recording = dl.record(model, PROMPTS, [FeatureActivations(autoencoder(model))], layers=[1], gen_length=6)
    opened, decided = dl.viz.feature_rates(recording).axes
    assert [str(one.message) for one in recwarn if issubclass(one.category, RuntimeWarning)] == []
    assert [text.get_text() for text in opened.texts] == ["no open positions"]
    assert not len(decided.texts)
    count, known = recording.feature_count[:, :, 0, 1].sum(1), recording.feature_positions[:, :, 0, 1].sum(1)
    rates = (count / known[:, None])[known > 0]
    change = rates.amax(0) - rates.amin(0)
    drawn = [int(line.get_label().split()[1]) for line in decided.get_lines()]
    assert sorted(change[drawn].tolist()) == pytest.approx(sorted(change.topk(6).values.tolist()))


@pytest.mark.long
def test_lines_are_shares_of_positions_and_added_losses():
    model = tiny("llada")
    sae = autoencoder(model)
    recording = dl.record(model, PROMPTS, [FeatureActivations(sae, (3, 4))], layers=[1], **RUN)
    figure = dl.viz.feature_rates(recording, [3, 4])
    drawn = {line.get_gid(): line.get_ydata() for axes in figure.axes for line in axes.get_lines()}
    answer = recording.run.masked[0]
    for number, feature in enumerate((3, 4)):
        fires = recording.feature_values[:, :, 0, :, number] > 0
        for name, inside in (("open", recording.run.masked[:-1]), ("decided", ~recording.run.masked[:-1] & answer)):
            expected = (fires & inside).sum((1, 2)) / inside.sum((1, 2))
            np.testing.assert_allclose(drawn[f"{name} {feature}"], expected.numpy(), rtol=1e-6)
    loss = insertion_loss(model, recording.run, sae, places=["open"], nulls=["untrained"])
    axes = dl.viz.insertion_by_step(loss, insertions=["sae", "untrained"]).axes[0]
    lines = {line.get_gid(): line.get_ydata() for line in axes.get_lines()}
    for name in ("sae", "untrained"):
        place = loss.insertions.index(name)
        added = (loss.loss[0, place, 0].sum(-1) - loss.plain.sum(-1)) / loss.positions.sum(-1)
        np.testing.assert_allclose(lines[name], added.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="place 'all' was not measured; there are 'open'"):
        dl.viz.insertion_by_step(loss, place="all")
    with pytest.raises(ValueError, match="has no features"):
        dl.viz.feature_rates(dl.record(model, PROMPTS, **RUN))
