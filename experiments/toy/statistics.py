"""Intervals: Wilson's for accuracies, a bootstrap over prompts for everything that comes many to a prompt."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A share or mean with its 95% interval; `n` counts the cases, `clusters` the prompts (0: none)."""

    value: float
    low: float
    high: float
    n: int
    clusters: int = 0


def wilson(successes: int, n: int, z: float = 1.959964) -> Estimate:
    """Wilson's score interval of a proportion, (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"a proportion needs at least one trial, got n = {n}")
    p, scale = successes / n, 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / scale
    # The exact ends at p = 0 and 1; rounding would put them a hair outside.
    return Estimate(p, 0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half, n)


def clustered_ratio(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, counts: npt.ArrayLike | None = None, seed: int = 0
) -> Estimate:
    """Ratio of sums over prompts, with the percentile interval of a bootstrap that draws whole prompts.

    numerators, denominators: one number per prompt. A share has the number of cases as its denominator, and
    then `n` is their sum; for other ratios `counts` says over how many cases each prompt's numbers were
    taken.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    n = int(np.sum(bottom if counts is None else counts))
    if bottom.sum() == 0:
        return Estimate(math.nan, math.nan, math.nan, n, len(top))
    draws = np.random.default_rng(seed).integers(len(top), size=(RESAMPLES, len(top)))
    sums = bottom[draws].sum(axis=1)
    ratios = top[draws].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high), n, len(top))


def interval(estimate: Mapping[str, Any], digits: int = 2) -> str:
    """`0.94 [0.90, 0.96]`."""
    value, low, high = (f"{estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
