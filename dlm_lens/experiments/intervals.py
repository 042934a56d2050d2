"""95% intervals: Wilson's for shares, a bootstrap over prompts for per-prompt numbers, Student's t over seeds."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 2000

Z = 1.959964
"""Quantile of the normal distribution, two-sided 95%."""

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t, two-sided 95%, for 1 to 9 degrees of freedom; more seeds use the last of them."""


class Interval(NamedTuple):
    """A number with its 95% interval; `n` counts cases (in a bootstrap prompts, with Student's t seeds)."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def wilson(correct: Sequence[Any], z: float = Z) -> Interval:
    """Share of true values with Wilson's score interval, (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Raises:
        ValueError: no case was given.
    """
    n, successes = len(correct), sum(map(bool, correct))
    if n < 1:
        raise ValueError("a share needs at least one case, got n = 0")
    p, scale = successes / n, 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / scale
    return Interval(p, 0.0 if not successes else centre - half, 1.0 if successes == n else centre + half, n)


def mean_over_prompts(values: Sequence[float | None], seed: int = 0) -> Interval:
    """Mean of one number per prompt, with the percentile interval of a bootstrap over prompts; None is left out."""
    known = np.asarray([value for value in values if value is not None and not math.isnan(value)], float)
    return ratio_over_prompts(known, np.ones(len(known)), seed)


def ratio_over_prompts(numerators: Any, denominators: Any, seed: int = 0) -> Interval:
    """Ratio of sums over prompts, with the percentile interval of a bootstrap that draws whole prompts."""
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    n = len(top)
    if n == 0 or bottom.sum() == 0:
        return Interval(math.nan, math.nan, math.nan, n)
    value = float(top.sum() / bottom.sum())
    if n < 2:
        return Interval(value, math.nan, math.nan, n)
    draws = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    sums = bottom[draws].sum(1)
    low, high = np.quantile(top[draws].sum(1)[sums > 0] / sums[sums > 0], (0.025, 0.975))
    return Interval(value, float(low), float(high), n)


def paired_difference(one: Sequence[Any], other: Sequence[Any], seed: int = 0) -> Interval:
    """Mean of one - other over the same prompts, with a bootstrap over prompts.

    Where all n differences of correct and wrong answers (or of changes, -1 to 1) are equal, every bootstrap draw is
    equal too. The interval then assumes that z^2 / (n + z^2) of the prompts, Wilson's upper bound for 0 of n, may
    have any other difference.

    Raises:
        ValueError: the two have different lengths.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} and {len(other)} values cannot be paired; give as many of both")
    differences = [float(a) - float(b) for a, b in zip(one, other, strict=True)]
    found, values = mean_over_prompts(differences, seed), {*map(float, one), *map(float, other)}
    if len(differences) < 2 or len({*differences}) > 1 or not values <= {-1.0, 0.0, 1.0}:
        return found
    unseen, most = Z**2 / (len(differences) + Z**2), 2 if -1.0 in values else 1
    low, high = found.value - unseen * (most + found.value), found.value + unseen * (most - found.value)
    return found._replace(low=low, high=high)


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean with its 95% interval, mean +- t s / sqrt(n); no interval for a single seed.

    Raises:
        ValueError: no value was given.
    """
    if not values:
        raise ValueError("a mean over seeds needs at least one, got none")
    centre = mean(values)
    if len(values) < 2:
        return Interval(centre, math.nan, math.nan, 1)
    quantile = QUANTILES[min(len(values) - 2, len(QUANTILES) - 1)]
    half = quantile * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, len(values))


def paired_over_seeds(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Mean of one - other over the seeds that both have, with Student's t."""
    return over_seeds([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def plus_minus(interval: Interval, digits: int = 3, sign: bool = False) -> str:
    """`0.680 ± 0.042`, or the number alone for a single seed."""
    value = f"{interval.value:{'+' if sign else ''}.{digits}f}"
    return value if math.isnan(interval.low) else f"{value} ± {interval.high - interval.value:.{digits}f}"
