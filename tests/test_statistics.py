"""Intervals over prompts: how often they cover the truth, at few prompts too, and shares at their bounds."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dlm_lens import statistics
from dlm_lens.experiments.intervals import (
    difference_of_ratios,
    mean_over_prompts,
    over_networks,
    paired_difference,
    ratio_over_prompts,
)
from dlm_lens.statistics import (
    CORRELATION_BOUNDS,
    POSITIVE_BOUNDS,
    SHARE_BOUNDS,
    difference_of,
    difference_of_differences,
    estimate,
    estimate_mean,
    expanded,
    mean_of,
    prompts_with_cases,
    ratio_by_prompt,
    ratio_of,
    summed,
    wilson_bounds,
)

TRIALS = 400


def covered(draw: Callable[[np.random.Generator], tuple[float, float]], truth: float) -> float:
    """How often an interval covers the truth."""
    generator = np.random.default_rng(11)
    found = [draw(generator) for _ in range(TRIALS)]
    return sum(low <= truth <= high for low, high in found) / TRIALS


@pytest.mark.parametrize(
    "prompts", [3, 6, pytest.param(12, marks=pytest.mark.long), pytest.param(48, marks=pytest.mark.long)]
)
def test_intervals_cover_the_truth_at_few_prompts_too(prompts: int) -> None:
    def mean(generator: np.random.Generator) -> tuple[float, float]:
        # Five entries a prompt, alike within it.
        values = generator.normal(size=(prompts, 1)) + 0.3 * generator.normal(size=(prompts, 5))
        where = np.repeat(np.arange(prompts), 5)
        found = estimate_mean(values.ravel(), where, prompts)
        return found.low, found.high

    def share(generator: np.random.Generator) -> tuple[float, float]:
        n = generator.integers(20, 60, size=prompts)
        hits = generator.binomial(n, generator.beta(2, 6, size=prompts))
        _, low, high = ratio_by_prompt(hits[:, None].astype(float), n[:, None].astype(float), bounds=SHARE_BOUNDS)
        return float(low[0]), float(high[0])

    def difference(generator: np.random.Generator) -> tuple[float, float]:
        # Both sides of a prompt share its effect: the pairing takes it out.
        own = 5 * generator.normal(size=prompts)
        sums = [own + generator.normal(size=prompts), np.ones(prompts), own + generator.normal(size=prompts)]
        found = estimate(np.stack([*sums, np.ones(prompts)], -1), difference_of)
        return found.low, found.high

    # Of 400 draws the standard deviation of 95% is 0.011.
    assert covered(mean, 0.0) >= 0.93 - 0.011
    assert covered(difference, 0.0) >= 0.93 - 0.011
    assert covered(share, 0.25) >= 0.93 - 0.02  # skewed


def exactly_covered(prompts: int, chances: dict[tuple[int, ...], float], differ: bool) -> float:
    """The coverage of intervals of prompts with one case each, summed over all counts of their outcomes.

    Args:
        prompts: how many.
        chances: of each outcome of a prompt: 0 or 1, or both of a pair.
        differ: of the difference between both of a pair, whose truth is 0; else of the share.
    """
    statistic, bounds = (difference_of, CORRELATION_BOUNDS) if differ else (mean_of, SHARE_BOUNDS)
    truth = 0.0 if differ else chances[1,]
    found = 0.0
    for counts in product(range(prompts + 1), repeat=len(chances)):
        if sum(counts) != prompts:
            continue
        outcomes = [values for values, count in zip(chances, counts, strict=True) for _ in range(count)]
        sums = [[number for value in values for number in (value, 1.0)] for values in outcomes]
        interval = estimate(sums, statistic, bounds=bounds)
        chance = stats.multinomial.pmf(counts, prompts, list(chances.values()))
        found += float(chance) * (interval.low <= truth <= interval.high)
    return found


def test_few_prompts_with_one_case_each_are_covered_less_often() -> None:
    """The exceptions that docs/probes.md names.

    A prompt's case is 0 or 1, so that few values are possible, and a bootstrap of a few of them leaves out what was
    not drawn. The coverage is a sum over all outcomes, without an error of sampling; only the intervals have one,
    of 2,000 draws.
    """
    pairs = dict.fromkeys(product((0, 1), repeat=2), 0.25)
    assert 0.87 < exactly_covered(6, pairs, differ=True) < 0.93
    assert 0.89 < exactly_covered(12, {(0,): 0.7, (1,): 0.3}, differ=False) < 0.93
    assert 0.90 < exactly_covered(48, {(0,): 0.8, (1,): 0.2}, differ=False) < 0.93


def test_the_library_and_the_experiments_have_one_interval() -> None:
    drawn = np.random.default_rng(0).normal(3.0, 1.0, size=2000)
    low, high = np.quantile(drawn, (0.025, 0.975))
    factor = stats.t.ppf(0.975, 5) / stats.norm.ppf(0.975) * math.sqrt(6 / 5)
    assert expanded(3.0, drawn, 6) == pytest.approx((3 - factor * (3 - low), 3 + factor * (high - 3)), rel=1e-6)
    values = np.random.default_rng(1).normal(size=24)
    one, other = estimate_mean(values, np.arange(24), 24), mean_over_prompts(values, bounds=None)
    # Other draws of the same distribution.
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.05 * (one.high - one.low))


def test_a_share_that_rounds_to_a_bound_has_the_interval_of_the_bound() -> None:
    """Sums in float32 are 1 on one device and 1 - 2^-24 on another."""
    exact, rounded = (estimate([[share, 1.0]] * 4, mean_of, bounds=SHARE_BOUNDS) for share in (1.0, 1 - 2**-24))
    assert exact.low < 0.6
    assert (rounded.low, rounded.high) == (exact.low, exact.high)


@pytest.mark.parametrize("prompts", [2, 6, 48])
def test_shares_at_a_bound_have_wilson_s_interval(prompts: int) -> None:
    n = np.ones((prompts, 1))
    for hits in (0 * n, n):
        _, low, high = ratio_by_prompt(hits, n, bounds=SHARE_BOUNDS)
        found = estimate(np.concatenate([hits, n], -1), mean_of, bounds=SHARE_BOUNDS)
        wanted = ratio_over_prompts(hits[:, 0], n[:, 0], bounds=(0, 1))
        assert (float(low[0]), float(high[0])) == pytest.approx((wanted.low, wanted.high))
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
        # Several cases in a prompt may be one as far as is known, also where the prompts have different numbers.
        cases = (1.0 + np.arange(prompts) % 3)[:, None]
        _, low, high = ratio_by_prompt(hits * cases, cases, bounds=SHARE_BOUNDS)
        several = estimate(np.concatenate([hits * cases, cases], -1), mean_of, bounds=SHARE_BOUNDS)
        assert (float(low[0]), float(high[0])) == (several.low, several.high) == (found.low, found.high)
        assert ratio_over_prompts((hits * cases)[:, 0], cases[:, 0], bounds=(0, 1))[1:3] == (found.low, found.high)
    # What is no share, such as a count of moves, may be equal in all prompts.
    assert ratio_by_prompt(0 * n, n)[1:] == (pytest.approx(0.0), pytest.approx(0.0))


@pytest.mark.parametrize("prompts", [2, 8])
@pytest.mark.parametrize("difference", [-1.0, 0.0, 0.25, 1.0])
def test_a_difference_that_is_the_same_in_all_prompts_is_not_certain(prompts: int, difference: float) -> None:
    """Up to Wilson's bound of 0 of n of the prompts may differ, wherever the library or an experiment reads it."""
    unseen = stats.binomtest(0, prompts).proportion_ci(method="wilson").high
    ends = difference - unseen * (difference + 1), difference + unseen * (1 - difference)
    wanted = pytest.approx(ends, rel=1e-6)
    other = max(0.0, -difference)  # both shares, whatever the difference, are the same in all prompts
    sums = [[4 * (other + difference), 4.0, 4 * other, 4.0]] * prompts
    found = [
        estimate(sums, difference_of, bounds=CORRELATION_BOUNDS),
        estimate_mean([difference] * prompts, np.arange(prompts), prompts, bounds=CORRELATION_BOUNDS),
        paired_difference([other + difference] * prompts, [other] * prompts, bounds=(-1.0, 1.0)),
        over_networks([([difference] * prompts, [1.0] * prompts)] * 3, bounds=(-1.0, 1.0)),
    ]
    one, two = (([4 * share] * prompts, [4.0] * prompts) for share in (other + difference, other))
    found.append(difference_of_ratios(one, two, bounds=(-1, 1)))
    for each in found:
        assert each.value == difference
        assert (each.low, each.high) == wanted
    # What has no bounds, such as a count, may be equal in all prompts.
    free = estimate(sums, difference_of)
    assert (free.low, free.high) == (difference, difference)


@pytest.mark.parametrize(("prompts", "truth"), [(2, 0.2), (2, 0.3), (2, 0.5), (3, 0.3)])
def test_few_prompts_of_which_as_many_cases_are_right_are_not_certain(prompts: int, truth: float) -> None:
    """Three cases in each prompt, summed over all their outcomes: 1 of 3 in both prompts is not exactly 1 / 3."""
    chance, covered = stats.binom.pmf(range(4), 3, truth), 0.0
    for hits in product(range(4), repeat=prompts):
        found = estimate([[each, 3] for each in hits], mean_of, bounds=SHARE_BOUNDS, resamples=400)
        covered += float(np.prod(chance[list(hits)])) * (found.low <= truth <= found.high)
    six = estimate([[1.0, 3.0]] * 6, mean_of, bounds=SHARE_BOUNDS)
    assert (six.low, six.high) == pytest.approx((1 / 3, 1 / 3))
    # Without a width of equal shares 0.84, 0.77 and 0.72 of two prompts, 0.91 of three.
    assert covered > 0.97


@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("truth", [0.01, 0.99])
def test_rare_cases_are_covered_however_much_those_of_a_prompt_depend_on_each_other(
    alike: float, truth: float
) -> None:
    """Six prompts of ten cases, which are alike within a prompt with this probability (1: all equal)."""

    def share(generator: np.random.Generator) -> tuple[float, float]:
        own = generator.random((6, 1)) < truth
        drawn = np.where(generator.random((6, 10)) < alike, own, generator.random((6, 10)) < truth)
        found = estimate(np.stack([drawn.sum(-1), np.full(6, 10.0)], -1), mean_of, bounds=SHARE_BOUNDS)
        return found.low, found.high

    # Of 400 draws the standard deviation of 95% is 0.011. Without a width at 0 and 1 the coverage is at most the
    # chance of another share: 1 - 0.99^6 = 0.06 where all are equal, 1 - 0.99^60 = 0.45 where none depend.
    assert covered(share, truth) >= 0.95 - 0.03


@pytest.mark.parametrize(("prompts", "often"), [(8, 0.84), (16, 0.85)])
def test_rare_shares_whose_cases_come_together_are_covered_less_often(prompts: int, often: float) -> None:
    """The exception that docs/probes.md names: 20 cases in each of some prompts, few of which have most of them."""

    def share(generator: np.random.Generator) -> tuple[float, float]:
        own, size = generator.random((prompts, 1)) < 0.05, (prompts, 20)
        drawn = np.where(generator.random(size) < 0.3, own, generator.random(size) < 0.05)
        found = estimate(
            np.stack([drawn.sum(-1), np.full(prompts, 20.0)], -1), mean_of, bounds=SHARE_BOUNDS, resamples=800
        )
        return found.low, found.high

    # Of 3,000 draws, in which the standard deviation is 0.007; that of 400 is 0.019.
    assert often - 3 * 0.019 < covered(share, 0.05) < often + 3 * 0.019


@pytest.mark.parametrize(
    ("sigma", "prompts", "share"),
    [(None, 6, 0.89), (None, 12, 0.91), (None, 48, 0.94), (1.0, 12, 0.85), (1.0, 48, 0.90)],
)
def test_skewed_means_are_covered_less_often(sigma: float | None, prompts: int, share: float) -> None:
    """The exception that docs/probes.md names: exponential or lognormal numbers, such as losses and divergences."""

    def mean(generator: np.random.Generator) -> tuple[float, float]:
        size = (prompts,)
        values = generator.exponential(size=size) if sigma is None else generator.lognormal(0.0, sigma, size=size)
        found = estimate(np.stack([values, np.ones(prompts)], -1), mean_of, bounds=POSITIVE_BOUNDS, resamples=400)
        return found.low, found.high

    truth = 1.0 if sigma is None else math.exp(sigma**2 / 2)
    # Of 3,000 draws, in which the standard deviation is 0.006; that of 400 is 0.016.
    assert share - 3 * 0.016 < covered(mean, truth) < share + 3 * 0.016


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (1, 3), (3, 10), (6, 7), (40, 40)])
def test_wilson_bounds_equal_scipy_s(hits: int, n: int) -> None:
    wanted = stats.binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson_bounds(hits, n) == pytest.approx((wanted.low, wanted.high), rel=1e-6, abs=1e-9)


def test_a_ratio_by_prompt_is_the_estimate_of_a_mean_whose_cases_are_rows() -> None:
    generator = np.random.default_rng(5)
    prompt = generator.permutation(3 * np.arange(36) // 9 * 2)  # twelve prompts, whose numbers have gaps
    cases = generator.integers(1, 9, size=36).astype(float)
    hits = generator.binomial(cases.astype(int), 0.4).astype(float)
    of_prompts = [[sum(hits[prompt == p]), sum(cases[prompt == p])] for p in sorted(set(prompt))]
    wanted = estimate(of_prompts, mean_of)
    found = [float(each[0]) for each in ratio_by_prompt(hits[:, None], cases[:, None], prompt)]
    assert found == pytest.approx([wanted.value, wanted.low, wanted.high])
    assert wanted.low < wanted.value < wanted.high


def test_the_prompts_of_an_interval_are_those_that_have_a_denominator() -> None:
    cases = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [3.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    assert prompts_with_cases(cases, None).tolist() == [2, 0, 3]
    assert prompts_with_cases(cases, [7, 7, 7, 2]).tolist() == [1, 0, 2]
    assert prompts_with_cases(cases[:, 2], [7, 3, 7, 2]) == 3
    assert prompts_with_cases(cases[:0], None).tolist() == [0, 0, 0]
    _, low, high = ratio_by_prompt(cases / 2, cases, [7, 7, 7, 2])
    assert (np.isfinite(low) & np.isfinite(high)).tolist() == [False, False, True]


def test_of_no_rows_there_is_neither_a_ratio_nor_a_mean() -> None:
    for each in ratio_by_prompt(np.zeros((0, 2, 3)), np.zeros((0, 2, 3)), bounds=SHARE_BOUNDS):
        assert each.shape == (2, 3)
        assert np.isnan(each).all()
    assert str(estimate_mean([], [], 0)) == "nan [no interval: 0 prompts]"


def test_bounds_cut_and_prompts_without_cases_do_not_count() -> None:
    values = np.array([0.0, 0.0, 1.0])
    wide = estimate_mean(values, np.arange(3), 3)
    assert wide.low < 0 < 1 < wide.high
    cut = estimate_mean(values, np.arange(3), 3, bounds=SHARE_BOUNDS)
    assert (cut.value, cut.low, cut.high) == (wide.value, 0.0, 1.0)
    assert estimate_mean(values, np.arange(3), 3, bounds=POSITIVE_BOUNDS).high == wide.high
    # Of four prompts one has a denominator in the first entry, three in the second.
    bottom = np.array([[2.0, 2.0], [0.0, 4.0], [0.0, 3.0], [0.0, 0.0]])
    ratio, low, high = ratio_by_prompt(bottom * [[0.5, 0.5]], bottom)
    assert ratio.tolist() == [0.5, 0.5]
    assert np.isnan([low[0], high[0]]).all()
    assert (low[1], high[1]) == pytest.approx((0.5, 0.5))
    assert summed([1.0, 2.0], [2, 2], 4).tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize("statistic", [difference_of, ratio_of])
def test_two_means_of_which_one_has_one_prompt_have_no_interval(statistic: Callable[..., Any]) -> None:
    alone, others = [[3.0, 1, 0, 0]], [[0.0, 0, 1 + i % 2, 1] for i in range(20)]
    found = estimate(alone + others, statistic)
    assert found.value == pytest.approx({difference_of: 3 - 1.5, ratio_of: 3 / 1.5}[statistic])
    assert str(found).endswith("[no interval: 1 prompt]")
    # With a second prompt on that side there is one.
    assert math.isfinite(estimate([*alone, [2.0, 1, 0, 0], *others], statistic).low)
    assert math.isnan(estimate(others, statistic).value)


@pytest.mark.parametrize(("statistic", "few"), [(difference_of, 2), (ratio_of, 4)])
def test_two_means_of_which_one_has_cases_in_few_prompts_are_covered(
    statistic: Callable[..., Any], few: int
) -> None:
    """Of 24 prompts; with the quantile of 24 the interval covered 0.72 and 0.88 of 400 draws."""
    cases = (np.arange(24) < few).astype(float)
    truth = 0.0 if statistic is difference_of else 1.0

    def draw(generator: np.random.Generator) -> tuple[float, float]:
        one, other = 5 + generator.normal(size=(2, 24))
        found = estimate(np.stack([one * cases, cases, other, np.ones(24)], -1), statistic, resamples=400)
        assert found.prompts == few
        return found.low, found.high

    assert covered(draw, truth) >= 0.93


@pytest.mark.parametrize("alone", range(4))
def test_two_differences_of_which_one_mean_has_one_prompt_have_no_interval(alone: int) -> None:
    # Mean m is 1 + m or 2 + m: the first difference minus the second is (0 - 1) - (2 - 3).
    sums = np.stack([[1.0 + m + i % 2, 1.0] for i in range(20) for m in range(4)]).reshape(20, 8)
    assert math.isfinite(estimate(sums, difference_of_differences).low)
    sums[1:, [2 * alone, 2 * alone + 1]] = 0.0
    found = estimate(sums, difference_of_differences)
    assert found.value == pytest.approx([-0.5, 0.5, 0.5, -0.5][alone])
    assert str(found).endswith("[no interval: 1 prompt]")


@pytest.mark.parametrize(
    ("prompt", "prompts", "sentence"),
    [
        ([0], 1, r"prompt has shape \[1\] for 2 entries; give each entry's prompt"),
        ([0, 5], 2, "prompt 5 of 2: prompts go from 0 to 1"),
        ([0, -1], 2, "prompt -1 of 2: prompts go from 0 to 1"),
        ([0, 0.5], 2, "prompt 0.5 of 2"),
        ([0, 1], "a", "prompts is 'a'; it must be a whole number of at least 0"),
    ],
)
def test_entries_without_a_prompt_are_refused(prompt: Any, prompts: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        estimate_mean([1, 2], prompt, prompts)
    assert estimate_mean([1, 2], [0.0, 1.0], 2).value == 1.5


def test_draws_in_parts_are_the_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).random(30)
    at_once = estimate_mean(values, np.arange(30), 30)
    monkeypatch.setattr(statistics, "DRAWN", 100)  # three draws at a time
    in_parts = estimate_mean(values, np.arange(30), 30)
    assert (in_parts.low, in_parts.high) == pytest.approx((at_once.low, at_once.high), rel=1e-12)
    assert in_parts.low < in_parts.value < in_parts.high
