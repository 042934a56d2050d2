"""Rules on intervals, their p-values, and the correction for many verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from dlm_lens.experiments.intervals import (
    Interval,
    mean_over_prompts,
    over_networks,
    over_seeds,
    unpaired_difference,
)
from dlm_lens.experiments.pages.appendix import adjusted, expected_by_chance
from dlm_lens.experiments.verdicts import (
    Judged,
    all_of,
    is_above,
    is_below,
    is_within,
    only_with,
    p_value,
)


@pytest.mark.parametrize(
    ("low", "high", "above", "below"),
    [
        (0.2, 0.4, "agrees", "disagrees"),
        (-0.4, -0.2, "disagrees", "agrees"),
        (-0.1, 0.4, "undecided", "undecided"),
        (0.0, 0.4, "undecided", "undecided"),
        (math.nan, math.nan, "undecided", "undecided"),
    ],
)
def test_a_claim_needs_its_whole_interval(low: float, high: float, above: str, below: str) -> None:
    found = Interval((low + high) / 2, low, high, 9)
    assert is_above(found, 0.0).verdict == above
    assert is_below(found, 0.0).verdict == below


def test_p_is_below_a_twentieth_exactly_where_the_interval_excludes_the_bound() -> None:
    found = Interval(0.3, 0.1, 0.6, 40)
    assert p_value(found, 0.1) == pytest.approx(0.05)
    assert p_value(found, 0.6) == pytest.approx(0.05)
    assert p_value(found, 0.0999) < 0.05 < p_value(found, 0.1001)
    # z = 0.3 / (0.2 / 1.96) on the lower side, by scipy.
    assert p_value(found, 0.0) == pytest.approx(2 * stats.norm.sf(0.3 / 0.2 * stats.norm.ppf(0.975)))
    assert p_value(Interval(0.3, math.nan, math.nan, 1), 0.0) is None
    assert p_value(Interval(0.3, 0.3, 0.3, 9), 0.0) == 0.0


@pytest.mark.parametrize("values", [[0.4, 0.5, 0.6], [0.1, 0.5, 0.6, 0.4, 0.5], [0.11, 0.12]])
def test_p_of_seeds_is_that_of_student_s_test(values: list[float]) -> None:
    """By the normal distribution the first, 0.013, was 0.0001: so small were 2% of the null's p of three seeds."""
    found = over_seeds(values)
    assert p_value(found, 0.0) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)
    networks = [([value] * 8, [1.0] * 8) for value in values]
    assert p_value(over_networks(networks, bounds=None), 0.0) == pytest.approx(p_value(found, 0.0), rel=1e-9)
    # Of two independent means the smaller number decides.
    apart = unpaired_difference(found, over_seeds([0.0, 0.001, -0.001, 0.0, 0.0, 0.0, 0.0]))
    assert p_value(apart, 0.0) == pytest.approx(p_value(found, 0.0), rel=0.05)


def test_p_of_few_prompts_is_uniform_where_the_null_is_true() -> None:
    rng = np.random.default_rng(2)
    means = [mean_over_prompts(rng.normal(size=6), bounds=None) for _ in range(400)]
    ps = np.array([p_value(found, 0.0) for found in means], float)
    # Of 400 draws the standard deviations are 0.005 and 0.011; by the normal distribution 0.020 were below 0.01.
    assert (ps < 0.01).mean() < 0.01 + 1.5 * 0.005
    assert abs((ps < 0.05).mean() - 0.05) < 2 * 0.011


def test_equivalence_is_two_one_sided_tests() -> None:
    inside, across, outside = (
        Interval(0.01, -0.02, 0.04, 5),
        Interval(0.01, -0.2, 0.2, 5),
        Interval(0.3, 0.2, 0.4, 5),
    )
    assert is_within(inside, -0.05, 0.05).verdict == "agrees"
    # The nearer bound decides: 0.04 from 0.01, where the half width is 0.03.
    assert is_within(inside, -0.05, 0.05).p == pytest.approx(2 * stats.norm.sf(0.04 / 0.03 * stats.norm.ppf(0.975)))
    assert is_within(across, -0.05, 0.05).verdict == "undecided"
    assert is_within(outside, -0.05, 0.05).verdict == "disagrees"
    assert is_within(outside, -0.05, 0.05).p == p_value(outside, 0.05)
    with pytest.raises(ValueError, match=r"the bounds are 0.1 and 0.1"):
        is_within(inside, 0.1, 0.1)


def test_the_correction_is_benjamini_and_hochberg_s() -> None:
    ps = np.random.default_rng(0).uniform(size=71) ** 3
    np.testing.assert_allclose(adjusted(ps.tolist()), stats.false_discovery_control(ps), rtol=1e-12)
    assert adjusted([]) == []


def test_comparisons_at_their_bound_are_decided_for_one_side_in_a_fortieth() -> None:
    draws = np.random.default_rng(1).normal(size=(4000, 30))
    half = stats.t.ppf(0.975, 29) * draws.std(1, ddof=1) / math.sqrt(30)
    decided = sum(
        is_above(Interval(m, m - h, m + h, 30), 0.0).verdict == "agrees"
        for m, h in zip(draws.mean(1), half, strict=True)
    )
    # Binomial: 100 expected, standard deviation 9.9.
    assert abs(decided - expected_by_chance(4000)) < 40


def test_all_of_several_parts() -> None:
    yes, no, open_ = Judged("agrees", 0.01), Judged("disagrees", 0.02), Judged("undecided", 0.3)
    assert all_of(yes, Judged("agrees", 0.04)) == ("agrees", 0.04)
    assert all_of(yes, open_) == ("undecided", 0.3)
    assert all_of(yes, no, open_) == ("disagrees", pytest.approx(0.06))
    assert all_of(yes, Judged("agrees")) == ("agrees", None)
    assert all_of(Judged("disagrees", 0.9), yes).p == 1.0


def test_a_verdict_holds_only_with_all_further_comparisons() -> None:
    yes, open_ = Judged("agrees", 0.01), Judged("undecided", 0.3)
    assert only_with(yes, "agrees", [Judged("agrees", 0.04), Judged("agrees", 0.02)]) == ("agrees", 0.04)
    assert only_with(yes, "agrees", [open_]) == ("undecided", 0.3)
    assert only_with(yes, "agrees", [Judged("disagrees", 0.2)]) == ("undecided", 0.2)
    assert only_with(yes, "agrees", []) == ("undecided", 0.01)
    assert only_with(yes, "disagrees", [open_]) == yes
