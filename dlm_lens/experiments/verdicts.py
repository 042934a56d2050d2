"""Verdicts: a rule on an interval, its p-value, and the correction for many verdicts on one page."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dlm_lens.experiments.intervals import Interval

Verdict = Literal["agrees", "disagrees", "undecided", "no counterpart"]
"""Agreement of a measured number with the paper's; "undecided" where the interval allows both."""

RATE = 0.05
"""Two-sided error rate of the intervals, and the false discovery rate of the correction."""


class Judged(NamedTuple):
    """A verdict and the p-value of the comparison that decides it; None where nothing was compared."""

    verdict: Verdict
    p: float | None = None


def is_above(found: Interval, bound: float) -> Judged:
    """The claim "above the bound": "agrees" if the whole interval is above it, "disagrees" if it is below."""
    return _judged(found.low > bound, found.high < bound, p_value(found, bound))


def is_below(found: Interval, bound: float) -> Judged:
    """The claim "below the bound": "agrees" if the whole interval is below it, "disagrees" if it is above."""
    return _judged(found.high < bound, found.low > bound, p_value(found, bound))


def is_within(found: Interval, low: float, high: float) -> Judged:
    """The claim "between the bounds", an equivalence: "agrees" if the whole interval lies between them.

    "disagrees" if it lies wholly outside. p is that of the two one-sided tests for equivalence, the larger of the
    two bounds' p-values; outside the bounds, that of the nearer bound.

    Raises:
        ValueError: low is not below high.
    """
    if not low < high:
        raise ValueError(f"the bounds are {low} and {high}; the first must be the smaller")
    inside, outside = low < found.low and found.high < high, found.high < low or found.low > high
    nearer = low if abs(found.value - low) < abs(found.value - high) else high
    both = [p for p in (p_value(found, low), p_value(found, high)) if p is not None]
    return _judged(inside, outside, max(both, default=None) if low < found.value < high else p_value(found, nearer))


def all_of(*judged: Judged) -> Judged:
    """A claim of several parts: "agrees" if all of them do, "disagrees" if one does, else "undecided".

    p is the largest of the parts' p-values where no part disagrees (an intersection-union test), else the smallest
    among those that disagree times their number (Bonferroni). None where a part that counts has none.

    Raises:
        ValueError: no part was given.
    """
    if not judged:
        raise ValueError("a claim needs at least one part, got none")
    verdicts = [one.verdict for one in judged]
    if "disagrees" in verdicts:
        ps = [one.p for one in judged if one.verdict == "disagrees"]
        return Judged(
            "disagrees", None if None in ps else min(1.0, len(judged) * min(p for p in ps if p is not None))
        )
    ps = [one.p for one in judged]
    agrees = all(verdict == "agrees" for verdict in verdicts)
    return Judged("agrees" if agrees else "undecided", None if None in ps else max(p for p in ps if p is not None))


def only_with(judged: Judged, effect: Verdict, further: Sequence[Judged]) -> Judged:
    """A verdict of which `effect` holds only if all further comparisons agree, and there is one; else "undecided".

    p of `effect` is then the largest of all (an intersection-union test). Other verdicts stay as they are.
    """
    if judged.verdict != effect:
        return judged
    known = [one.p for one in (judged, *further) if one.p is not None]
    holds = bool(further) and all(one.verdict == "agrees" for one in further)
    return Judged(effect if holds else "undecided", max(known, default=None))


def _judged(agrees: bool, disagrees: bool, p: float | None) -> Judged:
    return Judged("agrees" if agrees else "disagrees" if disagrees else "undecided", p)


def p_value(found: Interval, bound: float) -> float | None:
    """Two-sided p-value of "the true value is the bound", by Student's t with the interval's degrees of freedom.

    The standard error is the distance from the value to the end of the 95% interval on the bound's side, over the
    distribution's quantile: p = 2 P(T > |value - bound| / se), normal where `Interval.degrees` are infinite. So
    p < 0.05 exactly where the interval excludes the bound. None without an interval.
    """
    from scipy import stats

    if any(map(math.isnan, (found.value, found.low, found.high))):
        return None
    distance = abs(found.value - bound)
    half = found.value - found.low if bound < found.value else found.high - found.value
    if half <= 0:
        return 0.0 if distance else 1.0
    return float(2 * stats.t.sf(distance / half * stats.t.ppf(1 - RATE / 2, found.degrees), found.degrees))
