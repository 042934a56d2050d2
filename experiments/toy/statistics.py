"""Intervals: Wilson's for accuracies, a bootstrap over prompts for everything that comes many to a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm_lens.experiments import intervals


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
    share = intervals.wilson([True] * successes + [False] * (n - successes), z)
    return Estimate(share.value, share.low, share.high, n)


def clustered_ratio(
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    counts: npt.ArrayLike | None = None,
    seed: int = 0,
    *,
    bounds: tuple[float, float] | None,
) -> Estimate:
    """Ratio of sums over prompts, with the interval of a bootstrap that draws whole prompts.

    It is `ratio_over_prompts`: percentiles, expanded for few prompts; Wilson's interval where a share is 0 or 1.

    numerators, denominators: one number per prompt. A share has the number of cases as its denominator, and
    then `n` is their sum; for other ratios `counts` says over how many cases each prompt's numbers were
    taken. `bounds` are those of `ratio_over_prompts`: (0, 1) of a share.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    n = int(np.sum(bottom if counts is None else counts))
    found = intervals.ratio_over_prompts(top, bottom, seed, bounds=bounds)
    return Estimate(found.value, found.low, found.high, n, len(top))


def interval(estimate: Mapping[str, Any], digits: int = 2) -> str:
    """`0.94 [0.90, 0.96]`."""
    value, low, high = (f"{estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
