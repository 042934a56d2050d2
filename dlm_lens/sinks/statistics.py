"""Intervals over prompts, by a bootstrap that resamples prompts.

The steps, layers and heads of one prompt are not independent, so that whole prompts are drawn.
Used for everything that the sinks and the probes report with an interval.
"""

import math
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
        value: over all prompts.
        low: 2.5% quantile over resamples; NaN with fewer than two prompts.
        high: 97.5% quantile.
        prompts: how many prompts contribute.
    """

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4g} [no interval: {self.prompts} prompt{'' if self.prompts == 1 else 's'}]"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a table: `name`, `name_low`, `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def _resamples(prompts: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """How often each prompt is drawn, with replacement: [resample, prompt]."""
    draws: NDArray[np.int64] = np.random.default_rng(seed).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=resamples
    )
    return draws


def estimate(
    sums: Any, statistic: Callable[[Floats], Floats], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """A statistic of sums over prompts, and its percentile interval.

    Args:
        sums: [prompt, summand]; a prompt whose row is all zeros is left out.
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
        found = statistic(_resamples(prompts, resamples, seed) @ sums)
    # A draw with denominator 0 has no value.
    found = found[np.isfinite(found)]
    low, high = np.quantile(found, [0.025, 0.975]) if len(found) else (np.nan, np.nan)
    return Estimate(value, float(low), float(high), prompts)


def estimate_mean(values: Any, prompt: Any, prompts: int, *, seed: int = 0) -> Estimate:
    """Mean of values [entry], and its interval over prompts.

    Args:
        values: one number per entry.
        prompt: the prompt of each entry, from 0.
        prompts: how many prompts there are.
        seed: of the draws.
    """
    values = np.asarray(values, dtype=np.float64)
    return estimate(summed(np.stack([values, np.ones_like(values)], -1), prompt, prompts), mean_of, seed=seed)


def summed(values: Any, prompt: Any, prompts: int) -> Floats:
    """Sums of values [entry, summand] over the entries of every prompt: [prompt, summand]."""
    values = np.asarray(values, dtype=np.float64)
    found = np.zeros((prompts, *values.shape[1:]))
    np.add.at(found, np.asarray(prompt), values)
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


def ratio_by_prompt(
    numerator: Floats, denominator: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """Ratio of the sums over the first axis (prompts), entry by entry, and its 95% percentile interval.

    Each resample draws as many prompts as there are, with replacement, and takes both sums over the same draw.
    With fewer than two prompts there is no interval (NaN).

    Returns:
        The ratio, and the lower and the upper bound of its interval.
    """
    prompts = len(numerator)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = numerator.sum(0) / denominator.sum(0)
        if prompts < 2:
            return ratio, np.full_like(ratio, np.nan), np.full_like(ratio, np.nan)
        draws = _resamples(prompts, resamples, seed)
        flat = (draws @ numerator.reshape(prompts, -1)) / (draws @ denominator.reshape(prompts, -1))
    # Draws with denominator 0 are left out; an entry without any other draw has no interval.
    low, high = np.full((2, flat.shape[1]), np.nan)
    for entry, column in enumerate(flat.T):
        defined = column[np.isfinite(column)]
        if len(defined):
            low[entry], high[entry] = np.quantile(defined, [0.025, 0.975])
    return ratio, low.reshape(ratio.shape), high.reshape(ratio.shape)
