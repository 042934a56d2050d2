"""axis-features: its numbers and verdicts on planted losses, and the problems that it trains on."""

from types import SimpleNamespace

import pytest
import torch

from dlm_lens.experiments.denoising_axis import axis_features
from dlm_lens.experiments.denoising_axis.axis_features import INSERTIONS, PLACES, added, better, recovered, render
from dlm_lens.experiments.results import Record
from dlm_lens.features import SparseAutoencoder
from tests.experiments.finished_runs import finished_run


def _prompt(extra, scale=1.0):
    """A prompt of 10 predictions, 6 of them in the first half, that lose 0.2 nats each without an insertion."""
    n = [10, 6, 4]
    plain = [0.2 * count for count in n]
    found = {"n": n, "plain": plain, "unexplained": [scale, 10.0 * scale]}
    for name in INSERTIONS:
        early, late = extra[name]
        for place in PLACES:
            first, second = plain[1] + 6 * early * scale, plain[2] + 4 * late * scale
            found[f"{name}, {place}"] = [first + second, first, second]
    return found


def _results(extra, model="toy"):
    value = {"layer 0": [_prompt(extra, scale) for scale in (0.9, 1.0, 1.1)]}
    return finished_run({"settings": {}}, [Record({"model": model, "start": 0}, value, 0.0)])


FAITHFUL = {
    "sae": (-0.05, -0.15), "untrained": (0.5, 0.5), "random_decoder": (1.0, 1.0), "mean": (2.0, 2.0),
    "zero": (3.0, 3.0),
}  # fmt: skip


def test_numbers_are_those_of_the_planted_losses():
    results = _results(FAITHFUL)
    assert added(results, "toy", 0, "sae").value == pytest.approx((6 * -0.05 + 4 * -0.15) / 10)
    assert added(results, "toy", 0, "zero").value == pytest.approx(3.0)
    assert recovered(results, "toy", 0, "untrained").value == pytest.approx(2.5 / 3)
    assert recovered(results, "toy", 0, "zero").value == 0
    assert better(results, "toy", 0).value == pytest.approx(0.5 + 0.09)
    assert axis_features.early_excess(results, "toy", 0).value == pytest.approx(0.1)


def test_the_error_is_set_against_the_deviation_from_the_decoder_bias():
    """The column and the note said the mean of the activations."""
    state, mask = torch.tensor([[[1.0], [4.0], [9.0]]]), torch.tensor([[True, True, False]])
    bias = torch.tensor([3.0])
    sae = SparseAutoencoder(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1), bias, k=1, layer=0)
    done = SimpleNamespace(attention_mask=mask)
    # The reconstruction is the bias, 3; the mean of the content is 2.5.
    assert axis_features._unexplained(sae, [state, state + 1], done, 0) == [10.0, 10.0]
    rendering = render(_results(FAITHFUL))
    assert rendering.tables[0].head[2] == "squared error over deviation from the decoder bias"
    assert any("from the autoencoder's decoder bias" in note for note in rendering.notes)


def test_verdicts_follow_their_rules():
    verdicts = [finding.verdict for finding in render(_results(FAITHFUL)).findings]
    assert verdicts == ["agrees", "agrees", "agrees"]
    useless = {**FAITHFUL, "sae": (0.5, 0.9), "untrained": (0.1, 0.1)}
    assert [one.verdict for one in render(_results(useless)).findings] == ["disagrees", "disagrees", "disagrees"]
    # The claim is turned round for an AR model, and has no early steps.
    assert [one.verdict for one in render(_results(useless, "toy-ar")).findings] == ["agrees", "disagrees"]
    (table,) = render(_results(FAITHFUL, "toy-ar")).tables
    assert table.rows[0][2].startswith("0.10 [0.10")
    assert table.rows[0][-2:] == ["-", "3"]


def test_training_prompts_are_not_measured():
    settings = axis_features.SMALL
    measured = axis_features.problems_between(settings, 0, settings["prompts"])
    stop = settings["prompts"] + settings["train"]
    others = axis_features.problems_between(settings, settings["prompts"], stop)
    assert len(others) == settings["train"]
    assert not {each.prompt for each in measured} & {each.prompt for each in others}
    with pytest.raises(ValueError, match="toy_arithmetic has 100 problems; prompts and train together are 101"):
        axis_features.problems_between(settings, 0, 101)
    with pytest.raises(ValueError, match="axis-features needs solutions"):
        axis_features.problems_between({**settings, "task": "english_prompts"}, 0, 1)
