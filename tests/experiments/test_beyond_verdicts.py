"""Verdicts of the experiments beyond the paper's figures, each against its null, on planted results."""

import pytest

from dlm_lens.experiments.attention_sinks import beyond_context, beyond_freezing, beyond_position
from dlm_lens.experiments.results import Record, Results
from tests.experiments.finished_runs import finished_run

PROMPTS = 256
UNSEEN = 1.96**2 / (PROMPTS + 1.96**2)
"""The share of prompts that may have any other difference where all have the same (`statistics.within`)."""


def equal(value: float, digits: int = 2) -> str:
    """A difference of all prompts with its interval."""
    low, high = value - UNSEEN * (value + 1), value + UNSEEN * (1 - value)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def counts(swap: list[int], control: list[int]) -> Results:
    """Equal prompts with outcomes in the order token, position, both, neither."""
    value = [{"swap": swap, "control": control, "shift": [1, 1, 1, 1]}] * PROMPTS
    return finished_run({"settings": {}}, [Record({"model": "toy", "start": 0}, {"counts": value}, 0.0)])


def test_a_sink_at_the_token_s_new_place_needs_more_than_chance() -> None:
    # 0.4 of the sinks are where the token went: 0.3 alone and 0.1 at both places.
    token, semantic = beyond_position._findings(counts([3, 5, 1, 1], [0, 8, 1, 1]))
    assert (token.verdict, semantic.verdict) == ("agrees", "disagrees")
    assert f"in 0.40 [0.40, 0.40] of the trials, {equal(0.3)} more" in token.here
    assert f"difference {equal(-0.2)}" in semantic.here
    assert "0.10" in token.null
    # As often where no token of a sink went: nothing.
    token, _ = beyond_position._findings(counts([3, 5, 1, 1], [4, 4, 1, 1]))
    assert token.verdict == "disagrees"
    _, semantic = beyond_position._findings(counts([7, 1, 1, 1], [1, 7, 1, 1]))
    assert semantic.verdict == "agrees"


def answers(model: str, settings: dict, **correct: list[bool]) -> Results:
    records = [
        Record({"model": model, "condition": name.replace("_", " "), "hook": "", "start": 0}, {"correct": right}, 0)
        for name, right in correct.items()
    ]
    return finished_run({"settings": settings}, records)


@pytest.mark.parametrize(
    ("model", "right", "verdict"),
    [
        ("toy", 40, "agrees"),  # nothing is lost; 0 of 200 others may lose at most 0.02
        ("toy", 20, "disagrees"),
        ("toy-ar", 0, "agrees"),
        ("toy-ar", 36, "disagrees"),
        ("toy-ar", 20, "undecided"),
    ],
)
def test_discarding_the_past(model: str, right: int, verdict: str) -> None:
    kept = ([True] * right + [False] * (40 - right)) * 5
    given = answers(model, {"windows": [8], "columns": 4}, unmasked=[True] * 200, window_8=kept,
                    window_8_and_sinks=[True] * 200)  # fmt: skip
    claim, restored = beyond_context._findings(given)
    assert claim.verdict == verdict
    assert claim.null == "0: the past is not needed"
    assert restored.verdict == "no counterpart"
    assert f"change it by {1 - right / 40:.2f}" in restored.here


@pytest.mark.parametrize(
    ("followed", "frozen", "verdict"), [(4, 12, "agrees"), (12, 4, "disagrees"), (8, 9, "undecided")]
)
def test_a_mask_that_follows_sinks_costs_more(followed: int, frozen: int, verdict: str) -> None:
    right = {name: [n < count for n in range(16)] for name, count in (("f", followed), ("z", frozen))}
    given = answers("toy", {"from_steps": [4]}, followed_from_4=right["f"], frozen_at_4=right["z"])
    (finding,) = beyond_freezing._findings(given)
    assert finding.verdict == verdict
    assert finding.null
