"""Intervals of ratios over sequences: prompts are drawn again, since the steps and heads of one go together."""

import numpy as np

from dlm_lens.sinks.lifetimes import Floats

RESAMPLES = 2000


def ratio_by_prompt(
    numerator: Floats, denominator: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """Ratio of the sums over the first axis (prompts), and its 95% percentile interval.

    Each resample draws as many prompts as there are, with replacement, and takes both sums over the same draw.
    With fewer than two prompts there is no interval (NaN).
    """
    prompts = len(numerator)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = numerator.sum(0) / denominator.sum(0)
        if prompts < 2:
            return ratio, np.full_like(ratio, np.nan), np.full_like(ratio, np.nan)
        draws = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
        flat = (draws @ numerator.reshape(prompts, -1)) / (draws @ denominator.reshape(prompts, -1))
    # A draw without any denominator says nothing; an entry without any draw that says something has no interval.
    low, high = np.full((2, flat.shape[1]), np.nan)
    for entry, column in enumerate(flat.T):
        known = column[np.isfinite(column)]
        if len(known):
            low[entry], high[entry] = np.quantile(known, [0.025, 0.975])
    return ratio, low.reshape(ratio.shape), high.reshape(ratio.shape)
