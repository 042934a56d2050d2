"""Intervals over networks and prompts."""

import math

import numpy as np
import pytest
from scipy import stats

from dlm_lens.experiments.attention_sinks.recorded_runs import average, ratio
from dlm_lens.experiments.intervals import over_networks, ratio_over_prompts
from dlm_lens.experiments.results import Record, Results


def drawn(rng: np.random.Generator, networks: int, prompts: int, between: float, shared: float) -> np.ndarray:
    """Values with an effect of the network, one of the prompt, and noise; the true mean is 0."""
    return (
        between * rng.normal(size=(networks, 1))
        + shared * rng.normal(size=(1, prompts))
        + rng.normal(size=(networks, prompts))
    )


def test_one_network_has_the_interval_over_prompts() -> None:
    tops, bottoms = [1.0, 2.0, 4.0, 0.0], [2.0, 3.0, 4.0, 5.0]
    assert over_networks([(tops, bottoms)], seed=3) == ratio_over_prompts(tops, bottoms, 3)


def test_without_noise_of_prompts_it_is_student_s_t_over_networks() -> None:
    means = [0.2, 0.5, 0.35]
    found = over_networks([([mean] * 6, [1.0] * 6) for mean in means])
    low, high = stats.t.interval(0.95, 2, np.mean(means), stats.sem(means))
    assert found == pytest.approx((np.mean(means), low, high, 6), rel=1e-9)


def test_bounds_cut_the_interval() -> None:
    found = over_networks([([1.0] * 5, [1.0] * 5), ([0.5] * 5, [1.0] * 5)], bounds=(0.0, 1.0))
    assert (found.low, found.high) == (0.0, 1.0)


@pytest.mark.parametrize(("between", "shared"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_the_interval_covers_the_truth(between: float, shared: float) -> None:
    rng = np.random.default_rng(7)
    ones, hits = [1.0] * 24, 0
    for _ in range(150):
        values = drawn(rng, 3, 24, between, shared)
        found = over_networks([(row.tolist(), ones) for row in values])
        hits += found.low <= 0 <= found.high
    # At least 95%; of 150 draws the standard deviation is 0.018.
    assert hits / 150 > 0.95 - 2.5 * 0.018


def test_a_bootstrap_over_prompts_alone_does_not_cover_other_networks() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(100):
        values = drawn(rng, 3, 24, 1.0, 0.0).mean(0)
        found = ratio_over_prompts(values, np.ones(24))
        hits += found.low <= 0 <= found.high
    assert hits < 60


def test_networks_need_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="the networks have 2 and 3 prompts"):
        over_networks([([1.0, 2.0], [1.0, 1.0]), ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])])
    with pytest.raises(ValueError, match="needs at least one, got none"):
        over_networks([])


def test_results_are_grouped_by_network() -> None:
    records = [
        Record(
            {"model": "toy", "network": network, "start": start}, {"a": [network, start, None], "b": [1, 2, 0]}, 0.0
        )
        for network in (0, 1, 2)
        for start in (0, 3)
    ]
    found = Results({"settings": {}}, records)
    # Per network the sum of a is 2 network + 3, over 6; None counts in no mean.
    pairs = [([n, 0, n, 3], [1, 2, 1, 2]) for n in (0, 1, 2)]
    assert ratio(Results({"settings": {}}, [_without_none(r) for r in records]), "toy", "a", "b") == over_networks(
        pairs
    )
    mean = average(found, "toy", "a")
    assert mean.value == pytest.approx(np.mean([(2 * n + 3) / 4 for n in (0, 1, 2)]))
    assert math.isnan(average(found, "toy-ar", "a").value)


def _without_none(record: Record) -> Record:
    return Record(record.item, {name: values[:2] for name, values in record.value.items()}, 0.0)
