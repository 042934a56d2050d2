"""Numbers over seeds: means and paired differences with Student's t."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from dlm_lens.experiments.intervals import Interval

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t, two-sided 95%, for 1 to 9 degrees of freedom; the last one serves more seeds too, and is wide."""


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean with its 95% interval, mean +- t s / sqrt(n); no interval for a single seed.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("a mean over seeds needs at least one, got none")
    centre = mean(values)
    if len(values) < 2:
        return Interval(centre, math.nan, math.nan, 1)
    quantile = QUANTILES[min(len(values) - 2, len(QUANTILES) - 1)]
    half = quantile * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, len(values))


def paired(one: dict[int, float], other: dict[int, float]) -> Interval:
    """Mean of one - other over the seeds that both have."""
    return over_seeds([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def shown(interval: Interval, digits: int = 3, sign: bool = False) -> str:
    """`0.680 ± 0.042`, or the number alone for a single seed."""
    value = f"{interval.value:{'+' if sign else ''}.{digits}f}"
    return value if math.isnan(interval.low) else f"{value} ± {interval.high - interval.value:.{digits}f}"
