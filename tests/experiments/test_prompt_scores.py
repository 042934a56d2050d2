"""Changes of exact match over networks and prompts."""

import math

import pytest
from scipy import stats

from experiments.attention_sinks.prompt_scores import Prompt, mean_change, mean_ratio

PLAIN = {network: {(0, prompt): 1.0 for prompt in range(8)} for network in range(3)}
HIDDEN = {network: {(0, prompt): float(network == 2 and prompt < 4) for prompt in range(8)} for network in range(3)}


def test_a_change_stays_within_its_range() -> None:
    found = mean_change(HIDDEN, PLAIN)
    assert found.value == pytest.approx(-(1 + 1 + 0.5) / 3)
    # The part of the networks alone is wide enough to leave the range: 5/6 + t(2) s / sqrt(3) is above 1.
    assert -found.value + stats.t.ppf(0.975, 2) * math.sqrt(1 / 12) / math.sqrt(3) > 1
    assert found.low == -1.0
    assert found.high > -1.0


def test_a_change_of_changes_may_be_larger() -> None:
    changes = {network: dict.fromkeys(prompts, -1.0) for network, prompts in PLAIN.items()}
    opposite = {network: {prompt: float(network != 2) for prompt in prompts} for network, prompts in PLAIN.items()}
    found = mean_change(changes, opposite, bounds=(-2.0, 2.0))
    assert found.value == pytest.approx(-5 / 3)
    assert found.low == -2.0


def answers(*right: int) -> dict[Prompt, float]:
    return {("a", place): float(value) for place, value in enumerate(right)}


def test_a_ratio_of_answers_is_not_negative() -> None:
    found = mean_ratio(HIDDEN, PLAIN)
    assert found.value == pytest.approx(1 / 6)
    assert found.low == 0.0
    alone = mean_ratio({0: answers(1, 0, 0, 1, 0, 0)}, {0: answers(1, 1, 0, 0, 0, 0)})
    assert (alone.value, alone.low) == (1.0, 0.0)
    assert alone.high > 1.0


@pytest.mark.filterwarnings("error")
def test_a_draw_without_a_right_answer_gives_no_warning() -> None:
    hidden = {network: answers(1, 0, 0, 1, 0, 1) for network in range(2)}
    plain = {0: answers(1, 1, 0, 0, 0, 0), 1: answers(1, 0, 1, 0, 0, 0)}
    found = mean_ratio(hidden, plain)
    assert found.value == 1.5
    assert found.low == 0.0
