"""axis-early: means, nulls and verdicts of planted counts."""

from types import SimpleNamespace
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.experiments.attention_sinks.problems import problems_of
from dlm_lens.experiments.denoising_axis.axis_early import excess, findings, mean, recall_by_lag, run
from dlm_lens.experiments.results import Record, Results
from dlm_lens.probes import early_attention
from dlm_lens.testing import tiny


@pytest.mark.long
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_an_item_of_a_block_diffusion_model_holds_what_the_probe_finds(family: str) -> None:
    sampler = {"gen_length": 8, "block_length": 4, "steps": 8}
    settings: dict[str, Any] = {
        "task": "toy_arithmetic", "chat": False, "prompts": 3, "batch": 3, "sampler": sampler, "share": 0.25,
    }  # fmt: skip
    model = tiny(family)
    value = run({"model": "m", "start": 0}, settings, SimpleNamespace(model=lambda name: model))
    record = Record({"model": "m", "start": 0}, value, 0.0)
    found = Results({"settings": {"models": ["m"], "share": 0.25}}, [record])
    texts = [one.prompt for one in problems_of(settings, 0)]
    table = early_attention(
        dl.record(model, texts, [dl.ReceivedAttention("block", min_viewers=1)], **sampler), share=0.25
    ).table().set_index("predictor")  # fmt: skip
    for name in ("first steps", "other prompt"):
        assert mean(found, "m", name, "recall").value == pytest.approx(table.loc[name, "recall"], rel=1e-5)
    assert [lag for lag, _ in recall_by_lag(found, "m", "first steps")] == [1, 2, 3]


def planted(early: float, other: float) -> Results:
    """Recall of the first steps, and of another prompt's and another block's, over 4 decisions per prompt."""
    sums, lags = [], []
    for prompt in range(6):
        each = [early, 1.0, other, other]
        sums.append([[[4 * one * (1 - 0.002 * prompt), 4.0]] * 3 for one in each])
        lags.append([[[[0.0, 0.0], [4 * one, 4.0]]] * 3 for one in each])
    record = Record({"model": "m", "start": 0}, {"sums": sums, "lags": lags, "chance": [[1.0, 4.0]] * 6}, 0.0)
    return Results({"settings": {"models": ["m"], "share": 0.25}}, [record])


def test_means_differences_and_verdicts_of_planted_counts() -> None:
    found = planted(0.9, 0.6)
    assert mean(found, "m", "first steps", "recall").value == pytest.approx(0.9 * 0.995)
    assert excess(found, "m", "other prompt", "recall").value == pytest.approx(0.3 * 0.995)
    assert [(lag, one.value) for lag, one in recall_by_lag(found, "m", "other block")] == [(1, pytest.approx(0.6))]
    assert [one.verdict for one in findings(found)] == ["agrees"] * 3
    # Where no prompt differs: 0, and z^2 of n + z^2 prompts may have any other difference.
    unseen = 1.959964**2 / (6 + 1.959964**2)
    for measure, most in (("recall", 1.0), ("kept", 1.0), ("correlation", 2.0)):
        same = excess(planted(0.6, 0.6), "m", "other prompt", measure)
        assert same[:3] == pytest.approx((0.0, -unseen * most, unseen * most), abs=1e-6)
    assert [one.verdict for one in findings(planted(0.5, 0.6))] == ["disagrees"] * 3
