"""95% intervals: Wilson's for shares, bootstraps over prompts, Student's t over seeds and networks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from dlm_lens.statistics import (
    RESAMPLES,
    Bounds,
    Floats,
    Z,
    difference_of,
    estimate_in_draws,
    expanded,
    mean_of,
    student_quantile,
    wilson_bounds,
    within,
)


class Interval(NamedTuple):
    """A number with its 95% interval.

    `n` counts cases: in a bootstrap prompts with any, with Student's t seeds. `degrees` are those of freedom of the
    Student's t that the interval's width is from, infinite for the normal distribution; p-values need them.
    """

    value: float
    low: float
    high: float
    n: int
    degrees: float = math.inf

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def wilson(correct: Sequence[Any], z: float = Z) -> Interval:
    """Share of true values with Wilson's score interval (`wilson_bounds`).

    Raises:
        ValueError: no case was given.
    """
    n, successes = len(correct), sum(map(bool, correct))
    if n < 1:
        raise ValueError("a share needs at least one case, got n = 0")
    return Interval(successes / n, *wilson_bounds(successes, n, z), n)


def bounded_share(found: Interval, cases: float) -> Interval:
    """A share; where all prompts have 0 or all have 1, a bootstrap has no spread, and Wilson's interval is given.

    Args:
        found: the share, with an interval over prompts.
        cases: of Wilson's interval, such as `two_scales.effective_cases`; at least one per prompt is taken.
    """
    if found.value in (0.0, 1.0) and not math.isnan(found.low):
        return wilson([found.value == 1.0] * int(max(found.n, cases)))
    return found


UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


def mean_over_prompts(values: Sequence[float | None], seed: int = 0, *, bounds: Bounds | None) -> Interval:
    """As `ratio_over_prompts`, the mean of one number per prompt; None and NaN are left out."""
    known = np.asarray([value for value in values if value is not None and not math.isnan(value)], float)
    return ratio_over_prompts(known, np.ones(len(known)), seed, bounds=bounds)


def ratio_over_prompts(numerators: Any, denominators: Any, seed: int = 0, *, bounds: Bounds | None) -> Interval:
    """Ratio of sums over prompts, with the interval of a bootstrap that draws whole prompts (`estimate_in_draws`).

    Where the prompts of a share have none of their cases, or all have all, or a difference is the same in all
    prompts, the interval is that of `statistics.within`.

    Args:
        numerators: one per prompt.
        denominators: one per prompt.
        seed: of the bootstrap.
        bounds: the smallest and largest possible value; the interval is cut there. (0, 1) is a share. A difference
            has a negative smallest value; where all are 0, its interval is that which `paired_difference` has. None
            for a number without bounds, which is no share also where it is 0 or 1 in every prompt.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    return _bounded(_over_prompts(mean_of, seed, (top, bottom)), bounds)


def _bounded(found: Interval, bounds: Bounds | None) -> Interval:
    """An interval cut at the bounds, or where no prompt differs that of what was not seen (`statistics.within`)."""
    low, high = within(found.value, (found.low, found.high), found.n, bounds)
    return found._replace(low=low, high=high)


def _drawn(columns: Floats, seed: int) -> Floats:
    """Sums of columns [column, prompt] over the prompts of every draw: [column, draw].

    A draw takes as many prompts as there are, with replacement, those without cases too. `statistics.estimate` has
    another stream of random numbers; that of the results' pages is this one.
    """
    draws = _draws(columns.shape[1], seed)
    return np.stack([column[draws].sum(-1) for column in columns])


@lru_cache(maxsize=4)  # 21 MB each at 1,319 prompts
def _draws(n: int, seed: int) -> Any:
    """Which prompts each draw takes, [draw, n]: a page has hundreds of intervals over as many prompts."""
    return np.random.default_rng(seed).integers(max(1, n), size=(RESAMPLES, n))


def _over_prompts(statistic: Callable[[Floats], Floats], seed: int, *ratios: tuple[Any, Any]) -> Interval:
    """A statistic of the sums of each ratio; n counts the prompts with cases, in the ratio with fewer of them."""
    columns = np.stack([column for ratio in ratios for column in ratio])
    cases = min(int((bottom > 0).sum()) for _, bottom in ratios)
    found = estimate_in_draws(statistic, columns.sum(1), _drawn(columns, seed).T, cases)
    return Interval(found.value, found.low, found.high, found.prompts, found.prompts - 1)


def bootstrapped(value: float, drawn: Any, n: int) -> Interval:
    """A statistic with the interval of its values in a bootstrap that draws n prompts (or groups): `expanded`."""
    return Interval(value, *expanded(value, drawn, n), n, n - 1)


def difference_of_ratios(
    one: tuple[Any, Any], other: tuple[Any, Any], seed: int = 0, *, bounds: Bounds | None
) -> Interval:
    """The ratio of sums of `one` minus that of `other` over the same prompts, with a bootstrap that draws both.

    To compare a ratio with the end of another one's interval is no test of their difference: it counts neither what
    they have in common nor the first one's share of the error. Its prompts are those with cases, of the ratio
    that has fewer of them: it varies most. Where that has one, there is no interval.

    Where neither ratio varies between the prompts, as 3 of 3 and 0 of 3 in each, the interval is that of
    `statistics.within`; without bounds it then has no width.

    Args:
        one: numerators and denominators, one of each per prompt.
        other: those of the same prompts.
        seed: of the bootstrap.
        bounds: as for `ratio_over_prompts`: (-1, 1) of two shares.

    Raises:
        ValueError: the two have different numbers of prompts.
    """
    (top, bottom), (others, below) = (tuple(np.asarray(part, float) for part in pair) for pair in (one, other))
    if len({*map(len, (top, bottom, others, below))}) > 1:
        raise ValueError(f"{len(top)} and {len(others)} prompts cannot be paired; give the same prompts of both")
    return _bounded(_over_prompts(difference_of, seed, (top, bottom), (others, below)), bounds)


def paired_difference(
    one: Sequence[Any], other: Sequence[Any], seed: int = 0, *, bounds: Bounds | None
) -> Interval:
    """Mean of one - other over the same prompts, with a bootstrap over prompts.

    Where all differences are equal, every bootstrap draw is equal too, and the interval is that of
    `statistics.within`.

    Args:
        one: one number per prompt.
        other: one number per prompt.
        seed: of the bootstrap.
        bounds: the smallest and largest possible difference; the interval is cut there. Those of correct and wrong
            answers, 0 and 1, are -1 and 1; those of their changes, -1 to 1, are -2 and 2.

    Raises:
        ValueError: the two have different lengths.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} and {len(other)} values cannot be paired; give as many of both")
    differences = [float(a) - float(b) for a, b in zip(one, other, strict=True)]
    known = np.asarray([value for value in differences if not math.isnan(value)])
    return _bounded(_over_prompts(mean_of, seed, (known, np.ones(len(known)))), bounds)


def unpaired_difference(one: Interval, other: Interval) -> Interval:
    """The difference one - other of two independent estimates, with the interval that their own intervals imply.

    d - sqrt((a - a_low)^2 + (b_high - b)^2) to d + sqrt((a_high - a)^2 + (b - b_low)^2): Newcombe's interval, the
    method of variance estimates recovery (Zou and Donner 2008, "Construction of confidence limits about effect
    measures"). For two models that saw the same prompts it is wider than a paired interval.
    """
    value = one.value - other.value
    low = value - math.hypot(one.value - one.low, other.high - other.value)
    high = value + math.hypot(one.high - one.value, other.value - other.low)
    return Interval(value, low, high, min(one.n, other.n), min(one.degrees, other.degrees))


def over_networks(
    per_network: Sequence[tuple[Sequence[float], Sequence[float]]],
    seed: int = 0,
    *,
    bounds: Bounds | None,
) -> Interval:
    """Mean over networks of a ratio of sums over prompts, with an interval over both networks and prompts.

    All M networks see the same prompts, so that both are crossed random effects. With theta_m = sum_i a_mi /
    sum_i b_mi, the estimate is theta = mean_m theta_m and its variance

        v = s^2 / M + v_P,

    s^2 the variance of theta_m between the networks, v_P the variance of theta in a bootstrap that draws prompts,
    the same for all networks, times n / (n - 1); n prompts have cases in any network. The part of v that is due to
    both together is counted twice, which widens the interval. Half its width is t(nu) sqrt(v), with Welch and
    Satterthwaite's nu = v^2 / ((s^2 / M)^2 / (M - 1) + v_P^2 / (n - 1)). Where all values are at a bound of a
    share, or all differences are equal, it is that of `statistics.within` over the prompts. With one network it is
    `ratio_over_prompts`, which says nothing about other networks.

    In simulations the interval holds the true value in 94 to 97% of the draws with five networks, in 93% with
    three and in 87 to 89% with two, for which it is too narrow (`tests/experiments/test_intervals.py`). Of a true
    null p-values are below 0.01 in 2% of the draws with five, in 3% with three, and in 6 to 8% with two.

    Args:
        per_network: per network its numerators a and denominators b, one of each per prompt.
        seed: of the bootstrap.
        bounds: as for `ratio_over_prompts`.

    Raises:
        ValueError: no network, or networks with different numbers of prompts.
    """
    if not per_network:
        raise ValueError("an interval over networks needs at least one, got none")
    if len(per_network) == 1:
        return ratio_over_prompts(*per_network[0], seed, bounds=bounds)
    lengths = sorted({len(part) for network in per_network for part in network})
    if len(lengths) > 1:
        raise ValueError(f"the networks have {lengths[0]} and {lengths[-1]} prompts; give each the same prompts")
    top, bottom = np.asarray(per_network, float).transpose(1, 0, 2)
    known = bottom.sum(1) > 0
    networks = int(known.sum())
    if networks < 2:
        only = (top[known].sum(0), bottom[known].sum(0))
        return ratio_over_prompts(*only, seed, bounds=bounds) if networks else UNKNOWN
    top, bottom = top[known], bottom[known]
    cases = (bottom > 0).any(0)
    n = int(cases.sum())
    each = top.sum(1) / bottom.sum(1)
    value, between = float(each.mean()), float(each.var(ddof=1)) / networks
    drawn = _drawn(bottom, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = float(np.nanvar((_drawn(top, seed) / drawn).mean(0)[(drawn > 0).all(0)])) if n > 1 else 0.0
    inside *= n / max(1, n - 1)  # a bootstrap has the variance of n draws
    spread = between**2 / (networks - 1) + (inside**2 / (n - 1) if n > 1 else 0.0)
    # All networks see the same prompts, which are no further cases.
    if not spread:
        return _bounded(Interval(value, value, value, n, n - 1), bounds)
    degrees = (between + inside) ** 2 / spread
    half = student_quantile(degrees) * math.sqrt(between + inside)
    return _bounded(Interval(value, value - half, value + half, n, degrees), bounds)


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean with its 95% interval, mean +- t s / sqrt(n); no interval for a single seed.

    Raises:
        ValueError: no value was given, or one is NaN.
    """
    if not values:
        raise ValueError("a mean over seeds needs at least one, got none")
    if any(map(math.isnan, values)):
        raise ValueError(f"the values of the seeds are {list(values)}; leave out the seeds without a number")
    centre = mean(values)
    if len(values) < 2:
        return Interval(centre, math.nan, math.nan, 1)
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, len(values), len(values) - 1)


def paired_over_seeds(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Mean of one - other over the seeds that both have, with Student's t; NaN where they share none."""
    seeds = sorted(one.keys() & other.keys())
    return over_seeds([one[seed] - other[seed] for seed in seeds]) if seeds else UNKNOWN


def plus_minus(interval: Interval, digits: int = 3, sign: bool = False) -> str:
    """`0.680 ± 0.042`, or the number alone for a single seed; `-` where nothing is known."""
    if math.isnan(interval.value):
        return "-"
    value = f"{interval.value:{'+' if sign else ''}.{digits}f}"
    return value if math.isnan(interval.low) else f"{value} ± {interval.high - interval.value:.{digits}f}"


def signed(interval: Interval, digits: int = 3) -> str:
    """A difference with its sign: `+0.042 [+0.010, +0.074]`, without bounds where there are none; else `-`."""
    if math.isnan(interval.value):
        return "-"
    bounds = f" [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"
    return f"{interval.value:+.{digits}f}{'' if math.isnan(interval.low) else bounds}"
