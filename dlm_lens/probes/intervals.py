"""Intervals of statistics over prompts: the steps, layers and heads of one prompt are not independent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over prompts.

    Args:
        value: of all prompts.
        low: 2.5% quantile over resamples; NaN with fewer than two prompts.
        high: 97.5% quantile.
        prompts: how many prompts had something to say.
    """

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def estimate(
    sums: Any, statistic: Callable[[Floats], Floats], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A statistic of sums over prompts, and its percentile interval from a bootstrap that draws prompts.

    Args:
        sums: [prompt, summand]; a prompt whose row is all zeros says nothing and is left out.
        statistic: from sums over prompts [*draws, summand] to numbers [*draws].
        resamples: how many draws of as many prompts, with replacement.
        seed: of the draws.
    """
    sums = np.asarray(sums, dtype=np.float64)
    sums = sums[(sums != 0).any(-1)]
    prompts = len(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(sums.sum(0))) if prompts else np.nan
        if prompts < 2:
            return Estimate(value, np.nan, np.nan, prompts)
        draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
        found = statistic(draws @ sums)
    # A draw without a denominator says nothing.
    found = found[np.isfinite(found)]
    low, high = np.quantile(found, [0.025, 0.975]) if len(found) else (np.nan, np.nan)
    return Estimate(value, float(low), float(high), prompts)


def summed(values: Any, prompts: Any, count: int) -> Floats:
    """Sums of values [entry, summand] over the entries of every prompt: [prompt, summand]."""
    values = np.asarray(values, dtype=np.float64)
    found = np.zeros((count, *values.shape[1:]))
    np.add.at(found, np.asarray(prompts), values)
    return found


def mean_of(sums: Floats) -> Floats:
    """Sum over count, of sums [..., (sum, count)]."""
    mean: Floats = sums[..., 0] / sums[..., 1]
    return mean


def difference_of(sums: Floats) -> Floats:
    """The first mean minus the second, of sums [..., (sum, count, sum, count)]."""
    difference: Floats = sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]
    return difference


def ratio_of(sums: Floats) -> Floats:
    """The first mean over the second, of sums [..., (sum, count, sum, count)]."""
    ratio: Floats = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return ratio
