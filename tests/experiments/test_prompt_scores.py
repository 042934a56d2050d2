"""Changes of exact match over networks and prompts."""

import math

import pytest
from scipy import stats

from experiments.attention_sinks.prompt_scores import mean_change, mean_ratio

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


def test_a_ratio_of_answers_is_not_negative() -> None:
    found = mean_ratio(HIDDEN, PLAIN)
    assert found.value == pytest.approx(1 / 6)
    assert found.low == 0.0
