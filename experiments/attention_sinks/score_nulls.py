"""What received attention would look like without sinks: uniform, exponential and lognormal scores of as many keys.

A pattern's n keys have scores s_j = r_j / e_j (1: uniform). The nulls are n independent scores, divided by
their mean: all equal to 1; exponential, which is uniform on the simplex; lognormal, a smooth heavy tail, with the
same ratio of median to mean as the pattern. On the raw scale r_j = s_j e_j with the same s_j: so the nulls have
what a causal mask alone gives to early keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TOP = 0.04
"""The largest share of tokens that are sinks at eps = 3, according to the paper."""

DRAWS = 500
SIGMAS = np.arange(0, 4.01, 0.1)
"""Standard deviations of the logarithms of the lognormal scores."""

MARGIN = 0.03
"""Of 20 to 150 scores from a lognormal of any sigma up to 3, the top share exceeds its estimate from the median by
less than this on average (tests/experiments/test_score_nulls.py)."""

EDGES = np.append(np.round(np.arange(0, 1, 0.02), 2), 1.01)
"""Edges of the bins of A-bar_j, the share of a pattern's attention that key j receives."""


@dataclass(frozen=True)
class Concentration:
    """Per pattern: share of the top 4% of the keys, median over mean, and Gini coefficient."""

    top: Array
    median: Array
    gini: Array


def concentration(values: Array) -> Concentration:
    """Of positive numbers per key [..., key], each pattern on its own.

    The Gini coefficient is sum_i (2 i - n - 1) x_(i) / (n sum_i x_i) of the sorted values: 0 for equal ones, near 1
    where one key has everything.
    """
    n = values.shape[-1]
    ordered = np.sort(values, -1)
    total = ordered.sum(-1)
    count = top_count(n)
    weights = 2 * np.arange(1, n + 1) - n - 1
    return Concentration(
        ordered[..., n - count :].sum(-1) / total,
        np.median(ordered, -1) / (total / n),
        (ordered * weights).sum(-1) / (n * total),
    )


def top_count(n: int) -> int:
    """4% of n keys, rounded, at least one."""
    return max(1, round(TOP * n))


@dataclass(frozen=True)
class Null:
    """Expected statistics of one null for n keys."""

    top: float
    median: float
    gini: float


@dataclass(frozen=True)
class Nulls:
    """The nulls of one set of keys.

    Args:
        uniform: every score is 1.
        exponential: scores are exponential.
        conditional: top share and Gini coefficient of lognormal scores, given patterns' ratios of median to mean.
        exponential_counts: exponential scores' mean counts in the bins of EDGES per pattern.
        lognormal_counts: sum over patterns of lognormal scores' mean counts, given their ratios of median to mean.
    """

    uniform: Null
    exponential: Null
    conditional: Callable[[Array], tuple[Array, Array]]
    exponential_counts: Array
    lognormal_counts: Callable[[Array], Array]


@lru_cache(maxsize=512)
def nulls(expected: tuple[float, ...] | int) -> Nulls:
    """The nulls of n keys (relative to uniform), or of keys with these expectations e_j (raw column sums).

    Monte Carlo with a fixed seed, `DRAWS` patterns per sigma. The lognormal top share that belongs to a ratio of
    median to mean is the mean over simulated patterns of all sigmas with about this ratio.
    """
    weights = np.ones(expected) if isinstance(expected, int) else np.asarray(expected)
    n = len(weights)
    generator = np.random.default_rng(0)
    even = concentration(weights)
    drawn = generator.exponential(size=(20 * DRAWS, n))
    found = concentration(drawn * weights)
    exponential = Null(float(found.top.mean()), float(found.median.mean()), float(found.gini.mean()))
    normal = generator.standard_normal((len(SIGMAS), DRAWS, n))
    scores = np.exp(SIGMAS[:, None, None] * normal)
    ratio = concentration(scores).median
    simulated = concentration(scores * weights)
    counts = np.stack([_binned(one * weights) for one in scores])
    edges, tops, ginis = _running_means(np.log(ratio).ravel(), simulated.top.ravel(), simulated.gini.ravel())
    centres = np.log(ratio).mean(1)[::-1]

    def conditional(median: Array) -> tuple[Array, Array]:
        place = np.log(np.clip(median, 1e-9, None))
        return np.interp(place, edges, tops), np.interp(place, edges, ginis)

    def lognormal_counts(median: Array) -> Array:
        place = np.log(np.clip(median, 1e-9, None))
        sigma = len(SIGMAS) - 1 - np.searchsorted((centres[1:] + centres[:-1]) / 2, place)
        total: Array = counts[sigma].sum(0)
        return total

    return Nulls(
        Null(float(even.top), float(even.median), float(even.gini)),
        exponential,
        conditional,
        _binned(drawn * weights),
        lognormal_counts,
    )


def _binned(values: Array) -> Array:
    """Mean counts per pattern of the shares in the bins of EDGES."""
    shares = values / values.sum(-1, keepdims=True)
    return np.histogram(shares, EDGES)[0] / len(values)


def _running_means(place: Array, *values: Array) -> tuple[Array, ...]:
    """Means of the values in 60 groups of equal size along `place`, whose means come first."""
    order = np.array_split(np.argsort(place, kind="stable"), 60)
    return tuple(np.array([one[part].mean() for part in order]) for one in (place, *values))
