"""Intervals over networks and prompts."""

import math

import numpy as np
import pytest
from scipy import stats

from dlm_lens.experiments.attention_sinks.fig7_paths import to_the_right
from dlm_lens.experiments.attention_sinks.prompt_scores import Prompt, mean_match, mean_ratio
from dlm_lens.experiments.attention_sinks.recorded_runs import average, ratio
from dlm_lens.experiments.intervals import (
    Interval,
    difference_of_ratios,
    mean_over_prompts,
    over_networks,
    paired_difference,
    ratio_over_prompts,
    signed,
)
from dlm_lens.experiments.results import Record, Results
from dlm_lens.experiments.verdicts import is_below, p_value


def drawn(rng: np.random.Generator, networks: int, prompts: int, between: float, shared: float) -> np.ndarray:
    """Values with an effect of the network, one of the prompt, and noise; the true mean is 0."""
    return (
        between * rng.normal(size=(networks, 1))
        + shared * rng.normal(size=(1, prompts))
        + rng.normal(size=(networks, prompts))
    )


def test_one_network_has_the_interval_over_prompts() -> None:
    tops, bottoms = [1.0, 2.0, 4.0, 0.0], [2.0, 3.0, 4.0, 5.0]
    alone = ratio_over_prompts(tops, bottoms, 3, bounds=(0, 1))
    assert over_networks([(tops, bottoms)], seed=3, bounds=(0, 1)) == alone


def test_without_noise_of_prompts_it_is_student_s_t_over_networks() -> None:
    means = [0.2, 0.5, 0.35]
    found = over_networks([([mean] * 6, [1.0] * 6) for mean in means], bounds=None)
    low, high = stats.t.interval(0.95, 2, np.mean(means), stats.sem(means))
    assert found == pytest.approx((np.mean(means), low, high, 6, 2), rel=1e-9)


def wilson_bound(n: int) -> float:
    """Wilson's upper bound of 0 of n, from scipy."""
    return float(stats.binomtest(0, n).proportion_ci(method="wilson").high)


@pytest.mark.parametrize("n", [2, 6, 48])
def test_shares_at_a_bound_have_wilson_s_interval(n: int) -> None:
    none, every = [0.0] * n, [3.0] * n
    high = wilson_bound(n)
    zero = (pytest.approx(0.0), pytest.approx(0.0), pytest.approx(high, rel=1e-6), n, n - 1)
    one = (pytest.approx(1.0), pytest.approx(1 - high, rel=1e-6), pytest.approx(1.0), n, n - 1)
    assert ratio_over_prompts(none, every, bounds=(0, 1)) == zero
    assert ratio_over_prompts(every, every, bounds=(0, 1)) == one
    assert mean_over_prompts(none, bounds=(0, 1)) == zero
    networks = [(none, every)] * 3
    assert over_networks(networks, bounds=(0, 1)) == zero
    assert over_networks([(every, every)] * 3, bounds=(0, 1)) == one
    wrong: dict[Prompt, float] = {("a", place): 0.0 for place in range(n)}
    right: dict[Prompt, float] = dict.fromkeys(wrong, 1.0)
    assert mean_match(dict.fromkeys(range(3), wrong)) == zero
    assert mean_match(dict.fromkeys(range(3), right)) == one
    assert mean_ratio(dict.fromkeys(range(3), wrong), dict.fromkeys(range(3), right)) == zero
    assert mean_ratio({0: wrong}, {0: right}) == zero
    assert mean_ratio({0: right}, {0: right}) == one


@pytest.mark.parametrize("networks", [1, 2, 3])
def test_counts_scores_and_entropies_that_are_equal_are_no_shares(networks: int) -> None:
    """A count of places, at least 1, is no share of the prompts; nor is a score or an entropy of 0."""
    for value, bounds in ((1.0, (1.0, math.inf)), (1.0, (0.0, math.inf)), (0.0, (0.0, math.inf))):
        found = over_networks([([value] * 4, [1.0] * 4)] * networks, bounds=bounds)
        assert found == (value, value, value, 4, 3)
        assert mean_over_prompts([value] * 4, bounds=bounds) == found
    # Of several cases per prompt too.
    assert ratio_over_prompts([3.0] * 4, [3.0] * 4, bounds=(0.0, math.inf)) == (1.0, 1.0, 1.0, 4, 3)


def test_the_interval_of_equal_differences_reaches_towards_the_bounds() -> None:
    """Of two networks without spread, as of one: Wilson's bound for 0 of 4 of the way to either."""
    for networks in (1, 2):
        found = over_networks([([0.0] * 4, [1.0] * 4)] * networks, bounds=(-0.1, 1.0))
        assert (found.low, found.high) == pytest.approx((-0.1 * wilson_bound(4), wilson_bound(4)), rel=1e-6)


def test_a_difference_of_shares_that_do_not_vary_is_not_certain() -> None:
    found = difference_of_ratios(([3.0] * 3, [3.0] * 3), ([0.0] * 3, [3.0] * 3), bounds=(-1, 1))
    assert found == paired_difference([1.0] * 3, [0.0] * 3, bounds=(-1, 1)) == (1.0, found.low, 1.0, 3, 2)
    assert found.low == pytest.approx(1 - 2 * wilson_bound(3), rel=1e-6)
    p = p_value(found, 0.0)
    assert p is not None
    assert p > 0.05
    # Scores say nothing about how far they may vary.
    scores = ([0.3] * 3, [0.6] * 3), ([0.1] * 3, [0.4] * 3)
    assert difference_of_ratios(*scores, bounds=None)[:3] == (0.25, 0.25, 0.25)


def test_answers_of_several_seeds_that_never_differ_are_not_certain() -> None:
    """The means of two seeds are 0.5 in both conditions: as little is known as of answers that are 0 or 1."""
    found = paired_difference([0.5] * 4, [0.5] * 4, bounds=(-1.0, 1.0))
    assert found[:3] == (0.0, pytest.approx(-wilson_bound(4), rel=1e-6), pytest.approx(wilson_bound(4), rel=1e-6))


def test_no_verdict_is_certain_from_two_prompts_that_agree() -> None:
    found = ratio_over_prompts([0.0, 0.0], [1.0, 1.0], bounds=(0, 1))
    assert is_below(found, 0.5).verdict == "undecided"
    p = p_value(found, 0.5)
    assert p is not None
    assert p > 0.05
    assert is_below(ratio_over_prompts([0.0] * 96, [1.0] * 96, bounds=(0, 1)), 0.1).verdict == "agrees"


def test_prompts_without_cases_are_no_cases() -> None:
    found = ratio_over_prompts([0, 0, 0, 0], [2, 0, 0, 5], bounds=(0, 1))
    assert found.high == pytest.approx(wilson_bound(2), rel=1e-6)
    found = over_networks([([0, 0, 0], [2, 0, 0]), ([0, 0, 0], [0, 0, 5])], bounds=(0, 1))
    assert found.high == pytest.approx(wilson_bound(2), rel=1e-6)


def test_a_share_of_patterns_counts_prompts_that_have_any() -> None:
    """Three of 32 prompts have patterns that drift, all to the right: 3 of 3, and not 32 of 32."""
    found = {"sums directed": [2, 4, 1] + [0] * 29, "sums right": [2, 4, 1] + [0] * 29}
    value = {f"left to right: {name}": values for name, values in found.items()}
    records = [Record({"model": "smollm2", "start": 0}, value, 0.0)]
    share = to_the_right(Results({"settings": {}}, records), "smollm2", "left to right", "sums")
    assert share == (1.0, pytest.approx(1 - wilson_bound(3), rel=1e-6), 1.0, 3, 2)


def widened(n: int) -> float:
    """What the distances of percentiles from the value are multiplied by for n prompts."""
    return float(stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975) * math.sqrt(n / (n - 1)))


def test_a_difference_of_ratios_counts_the_prompts_of_the_ratio_that_has_fewer() -> None:
    rng = np.random.default_rng(0)
    below = rng.integers(1, 5, size=20).astype(float)
    others, bottom = rng.binomial(below.astype(int), 0.4).astype(float), np.where(np.arange(20) < 6, 4.0, 0.0)
    top = np.array([4.0, 1.0, 0.0, 2.0, 3.0, 1.0] + [0.0] * 14)
    found = difference_of_ratios((top, bottom), (others, below), bounds=(-1, 1))
    draws = np.random.default_rng(0).integers(20, size=(2000, 20))
    values = [
        top[at].sum() / bottom[at].sum() - others[at].sum() / below[at].sum() for at in draws if bottom[at].any()
    ]
    expected = found.value + widened(6) * (np.quantile(values, (0.025, 0.975)) - found.value)
    assert found.value == pytest.approx(11 / 24 - others.sum() / below.sum())
    assert found[1:] == pytest.approx((*expected, 6, 5), rel=1e-6)
    # Of one prompt with cases nothing is known about others.
    alone = np.where(np.arange(20) < 1, 4.0, 0.0)
    assert np.isnan(difference_of_ratios((alone / 2, alone), (others, below), bounds=(-1, 1))[1:3]).all()


def test_over_networks_prompts_without_cases_do_not_count() -> None:
    bottom = np.array([[2.0, 3.0, 1.0, 0.0], [2.0, 1.0, 0.0, 0.0], [1.0, 3.0, 2.0, 0.0]])
    top = np.array([[2.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]])
    bottom, top = (np.concatenate([part, np.zeros((3, 16))], 1) for part in (bottom, top))
    found = over_networks([(a.tolist(), b.tolist()) for a, b in zip(top, bottom, strict=True)], bounds=None)
    ratios = top.sum(1) / bottom.sum(1)
    drawn = []
    for at in np.random.default_rng(0).integers(20, size=(2000, 20)):
        sums = bottom[:, at].sum(1)
        drawn += [(top[:, at].sum(1) / sums).mean()] if sums.all() else []
    between, within = ratios.var(ddof=1) / 3, np.var(drawn) * 3 / 2  # three prompts have cases
    freedom = (between + within) ** 2 / (between**2 / 2 + within**2 / 2)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(between + within)
    expected = ratios.mean(), ratios.mean() - half, ratios.mean() + half, 3, freedom
    assert found == pytest.approx(expected, rel=1e-9)


def test_differences_and_sums_at_zero_are_no_shares() -> None:
    # Equal log-likelihoods, and errors that equal the spread in every prompt.
    assert paired_difference([0.25, -3.5], [0.25, -3.5], bounds=None)[:3] == (0.0, 0.0, 0.0)
    assert ratio_over_prompts([0.3, 1.7], [0.3, 1.7], bounds=None)[:3] == (1.0, 1.0, 1.0)


def test_counts_of_0_and_1_are_a_share_only_where_the_caller_says_so() -> None:
    """Sinks per prompt may be more than one, also where these prompts have none or one each."""
    counts, ones = [0, 1, 1, 1], [1] * 4
    free, share = (mean_over_prompts(counts, bounds=bounds) for bounds in (None, (0, 1)))
    assert free == (0.75, free.low, free.high, 4, 3)
    assert free.low < 0 < 1 < free.high
    assert share == (0.75, 0, 1, 4, 3)
    assert mean_over_prompts([1] * 4, bounds=None)[:3] == (1.0, 1.0, 1.0)
    assert over_networks([(ones, ones)] * 3, bounds=None)[:3] == (1.0, 1.0, 1.0)
    assert difference_of_ratios((ones, ones), ([0] * 4, ones), bounds=None)[:3] == (1.0, 1.0, 1.0)
    assert paired_difference(ones, [0] * 4, bounds=None)[:3] == (1.0, 1.0, 1.0)
    for call in (mean_over_prompts, over_networks):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'bounds'"):
            call([(ones, ones)])  # type: ignore[call-arg]


def test_differences_of_shares_that_are_0_may_have_either_sign() -> None:
    high = wilson_bound(4)
    expected = (0.0, pytest.approx(-high, rel=1e-6), pytest.approx(high, rel=1e-6), 4, 3)
    assert paired_difference([0, 1, 1, 0], [0, 1, 1, 0], bounds=(-1, 1)) == expected
    assert ratio_over_prompts([0.0] * 4, [1.0] * 4, bounds=(-1.0, 1.0)) == expected
    assert mean_over_prompts([0.0] * 4, bounds=(-1.0, 1.0)) == expected
    for networks in (1, 2):
        assert over_networks([([0.0] * 4, [1.0] * 4)] * networks, bounds=(-1.0, 1.0)) == expected
        twice = over_networks([([0.0] * 4, [1.0] * 4)] * networks, bounds=(-2.0, 2.0))
        assert twice.high == pytest.approx(2 * high, rel=1e-6)


def test_bounds_cut_the_interval() -> None:
    found = over_networks([([1.0] * 5, [1.0] * 5), ([0.5] * 5, [1.0] * 5)], bounds=(0.0, 1.0))
    assert (found.low, found.high) == (0.0, 1.0)


@pytest.mark.parametrize(("between", "shared"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_the_interval_covers_the_truth(between: float, shared: float) -> None:
    rng = np.random.default_rng(7)
    ones, hits = [1.0] * 24, 0
    for _ in range(150):
        values = drawn(rng, 3, 24, between, shared)
        found = over_networks([(row.tolist(), ones) for row in values], bounds=None)
        hits += found.low <= 0 <= found.high
    # At least 95%; of 150 draws the standard deviation is 0.018.
    assert hits / 150 > 0.95 - 2.5 * 0.018


def half_widths(values: np.ndarray, level: float = 0.95) -> np.ndarray:
    """Of `over_networks` [draw, network, prompt], denominators of 1, the variance of prompts in closed form.

    p < 1 - level is where the mean is beyond that of a level.
    """
    networks, n = values.shape[1:]
    between, within = values.mean(2).var(1, ddof=1) / networks, values.mean(1).var(1, ddof=1) / n
    both = between + within
    degrees = both**2 / (between**2 / (networks - 1) + within**2 / (n - 1))
    found: np.ndarray = stats.t.ppf((1 + level) / 2, degrees) * np.sqrt(both)
    return found


@pytest.mark.parametrize(
    ("networks", "n", "between", "least", "most", "small"),
    [
        (2, 96, 0.5, 0.86, 0.89, 0.075), (2, 16, 1.0, 0.87, 0.91, 0.058), (3, 96, 0.5, 0.92, 0.95, 0.033),
        (5, 96, 0.5, 0.94, 0.97, 0.015),
    ],
)  # fmt: skip
def test_the_interval_over_two_networks_is_narrower_than_it_should_be(
    networks: int, n: int, between: float, least: float, most: float, small: float
) -> None:
    """The shares in the docstring of `over_networks`; of 20,000 draws their standard deviation is 0.002."""
    rng = np.random.default_rng(3)
    one = drawn(rng, networks, n, between, 1.0)
    found = over_networks([(row.tolist(), [1.0] * n) for row in one], bounds=None)
    # The bootstrap of 2,000 draws knows a variance to 3%.
    assert (found.high - found.low) / 2 == pytest.approx(float(half_widths(one[None])[0]), rel=0.1)
    effects = between * rng.normal(size=(20_000, networks, 1)) + rng.normal(size=(20_000, 1, n))
    values = effects + 0.7 * rng.normal(size=(20_000, networks, n))
    covered = float((np.abs(values.mean((1, 2))) <= half_widths(values)).mean())
    assert least < covered < most
    # p-values below 0.01 of this true null, likewise in the docstring.
    assert float((np.abs(values.mean((1, 2))) > half_widths(values, 0.99)).mean()) == pytest.approx(
        small, abs=0.004
    )


def test_a_bootstrap_over_prompts_alone_does_not_cover_other_networks() -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(100):
        values = drawn(rng, 3, 24, 1.0, 0.0).mean(0)
        found = ratio_over_prompts(values, np.ones(24), bounds=None)
        hits += found.low <= 0 <= found.high
    assert hits < 60


def test_networks_need_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="the networks have 2 and 3 prompts"):
        over_networks([([1.0, 2.0], [1.0, 1.0]), ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])], bounds=(0, 1))
    with pytest.raises(ValueError, match="needs at least one, got none"):
        over_networks([], bounds=(0, 1))


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
    known = Results({"settings": {}}, [_without_none(r) for r in records])
    assert ratio(known, "toy", "a", "b", bounds=None) == over_networks(pairs, bounds=None)
    mean = average(found, "toy", "a", bounds=None)
    assert mean.value == pytest.approx(np.mean([(2 * n + 3) / 4 for n in (0, 1, 2)]))
    assert math.isnan(average(found, "toy-ar", "a", bounds=None).value)


def _without_none(record: Record) -> Record:
    return Record(record.item, {name: values[:2] for name, values in record.value.items()}, 0.0)


@pytest.mark.parametrize("n", [6, 12, 48])
@pytest.mark.parametrize("kind", ["mean", "ratio", "difference", "difference of ratios", "networks"])
def test_intervals_over_few_prompts_cover_the_truth(n: int, kind: str) -> None:
    """A percentile interval covers 85% at n = 6 and 91% at n = 12."""
    rng, hits, runs = np.random.default_rng(11), 0, 600
    for _ in range(runs):
        values, bottoms = rng.normal(size=(2, n)), rng.uniform(1, 2, size=(2, n))
        if kind == "mean":
            found = mean_over_prompts(values[0].tolist(), bounds=None)
        elif kind == "ratio":
            found = ratio_over_prompts(values[0] * bottoms[0], bottoms[0], bounds=None)
        elif kind == "difference":
            found = paired_difference(values[0].tolist(), values[1].tolist(), bounds=None)
        elif kind == "difference of ratios":
            found = difference_of_ratios(*((values[i] * bottoms[i], bottoms[i]) for i in range(2)), bounds=None)
        else:
            found = over_networks([(row.tolist(), [1.0] * n) for row in values], bounds=None)
        hits += found.low <= 0 <= found.high
    # The standard deviation of the share is 0.009.
    assert hits / runs >= 0.93


@pytest.mark.parametrize("n", [2, 6, 12, 48])
def test_the_interval_of_a_mean_is_near_student_s(n: int) -> None:
    values = np.random.default_rng(n).normal(3, 1, size=n)
    found = mean_over_prompts(values.tolist(), bounds=None)
    low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    # A bootstrap of two values has but three means.
    assert found.high - found.low == pytest.approx(high - low, rel=0.42 if n == 2 else 0.12)
    wider = stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975) * math.sqrt(n / (n - 1))
    drawn = values[np.random.default_rng(0).integers(n, size=(2000, n))].mean(1)
    expected = values.mean() + wider * (np.quantile(drawn, (0.025, 0.975)) - values.mean())
    np.testing.assert_allclose(found[1:3], expected, rtol=1e-6)


def test_p_is_below_a_twentieth_exactly_where_the_bootstrap_interval_excludes_the_bound() -> None:
    rng = np.random.default_rng(5)
    decided = 0
    for _ in range(300):
        found = mean_over_prompts(rng.normal(0.8, 1, size=6).tolist(), bounds=None)
        p = p_value(found, 0.0)
        assert p is not None
        assert (p < 0.05) == (found.low > 0 or found.high < 0) == (is_below(found, 0.0).verdict != "undecided")
        decided += p < 0.05
    assert 50 < decided < 250


def test_counts_stay_within_0_and_1_and_one_prompt_has_no_interval() -> None:
    found = ratio_over_prompts([5, 5, 5, 4], [5, 5, 5, 5], bounds=(0, 1))
    assert found.high == 1.0
    assert mean_over_prompts([0.9, 0.9, 0.2], bounds=(0, 1)).high > 0.9
    assert math.isnan(ratio_over_prompts([0, 3, 0], [0, 4, 0], bounds=(0, 1)).low)
    assert over_networks([([0.9, 0.9, 0.2], [1.0] * 3)], bounds=(0.0, 1.0)).high == 1.0


def test_a_signed_difference_says_what_is_not_known() -> None:
    assert signed(Interval(0.042, 0.01, 0.074, 9)) == "+0.042 [+0.010, +0.074]"
    assert signed(Interval(-0.1, math.nan, math.nan, 1), 2) == "-0.10"
    assert signed(Interval(math.nan, math.nan, math.nan, 0)) == "-"
