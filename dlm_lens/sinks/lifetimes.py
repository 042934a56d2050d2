"""Lifetimes of sinks: the active intervals of every position under hysteresis, and the moves that link them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.sinks.detectors.base import Detector
from dlm_lens.statistics import Floats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class SinkLifetimes:
    """Active intervals: runs of consecutive steps at which one position is a sink; one entry each.

    Args:
        pattern: which pattern, an index over (batch, layer, head).
        position: the key.
        first, last: first and last step of the interval.
        peak, mean: largest and mean score in it.
        peak_step: step of the largest score (the first of equals).
        main_steps: at how many of its steps the position was the pattern's largest sink.
        born: whether the onset was observed; False at the first step, and after steps without any score.
        died: whether the end was observed; False at the last step, and before steps without any score.
    """

    pattern: Ints
    position: Ints
    first: Ints
    last: Ints
    peak: Floats
    mean: Floats
    peak_step: Ints
    main_steps: Ints
    born: Bools
    died: Bools

    def __len__(self) -> int:
        return len(self.pattern)

    @property
    def steps(self) -> Ints:
        """Length of each interval in steps; at least this long where its end was not observed."""
        return self.last - self.first + 1

    @property
    def transient(self) -> Bools:
        """Whether it was seen to end after at most `TRANSIENT_STEPS` steps."""
        return self.died & (self.steps <= TRANSIENT_STEPS)


@dataclass(frozen=True)
class FollowedSinks:
    """The sinks of some patterns over the steps, from `follow_sinks`.

    The fields are those of `Trajectories`, with one axis of patterns.
    """

    lifetimes: SinkLifetimes
    main: Int[Tensor, "step pattern"]
    main_score: Float[Tensor, "step pattern"]
    counts: Int[Tensor, "step pattern"]
    defined: Bool[Tensor, "step pattern"]
    switched: Bool[Tensor, "step pattern"]
    static_position: Int[Tensor, "pattern"]
    static_share: Float[Tensor, "pattern"]


def active_steps(
    scores: Float[Tensor, "step pattern key"],
    detector: Detector,
    hysteresis: float,
    entered: Bool[Tensor, "step pattern key"] | None = None,
) -> Bool[Tensor, "step pattern key"]:
    """Which keys are active: from the step at which the detector finds them to the last before they fall below.

    active_t = detect_t or (active_{t-1} and holds_t), where `holds` compares with the threshold of the rule whose
    setting is multiplied by `hysteresis`.

    Args:
        scores: the scores.
        detector: the rule.
        hysteresis: factor of the rule's setting for keys that are active already; 1 for none.
        entered: the detections, if they are known.

    Raises:
        TypeError: the detector has no hysteresis.
    """
    on = detector.detect(scores) if entered is None else entered.clone()
    if hysteresis == 1.0:
        return on
    holds = detector.holds(scores, hysteresis)
    for step in range(1, len(on)):
        on[step] |= on[step - 1] & holds[step]
    return on


def follow_sinks(scores: Float[Tensor, "step pattern key"], on: Bool[Tensor, "step pattern key"]) -> FollowedSinks:
    """Lifetimes, largest sinks, switches and the most persistent position, from scores and active keys `on`."""
    steps, patterns, _ = scores.shape
    defined = ~scores.isnan().all(-1)
    # Few columns are ever sinks: everything below reads those alone.
    pattern, position = on.any(0).nonzero(as_tuple=True)
    columns, values = on[:, pattern, position], scores[:, pattern, position]
    counts = torch.zeros(steps, patterns, dtype=torch.long).index_add_(1, pattern, columns.long())
    main, best = _largest(columns, values, pattern, position, patterns)
    static_position, static_share = _most_persistent(columns.sum(0), pattern, position, (counts > 0).sum(0))
    lifetimes = _intervals_of(columns, values, pattern, position, main, defined)
    return FollowedSinks(lifetimes, main, best, counts, defined, _switches(on, main), static_position, static_share)


def _largest(
    columns: Tensor, values: Tensor, pattern: Tensor, position: Tensor, patterns: int
) -> tuple[Tensor, Tensor]:
    """Position (the earlier of equals; -1 without a sink) and score of every pattern's largest sink."""
    steps = len(columns)
    where = pattern.expand(steps, -1)
    best = values.new_full((steps, patterns), -torch.inf).scatter_reduce_(
        1, where, values.masked_fill(~columns, -torch.inf), "amax"
    )
    far = torch.iinfo(torch.long).max
    candidates = position.expand(steps, -1).masked_fill(~columns | (values < best.gather(1, where)), far)
    main = position.new_full((steps, patterns), far).scatter_reduce_(1, where, candidates, "amin")
    return main.masked_fill(main == far, -1), best.masked_fill(main == far, torch.nan)


def _most_persistent(
    on_steps: Tensor, pattern: Tensor, position: Tensor, with_sink: Tensor
) -> tuple[Tensor, Tensor]:
    """The position that is active at most steps, and its share of the steps that have a sink."""
    most = torch.zeros_like(with_sink).scatter_reduce_(0, pattern, on_steps, "amax")
    far = torch.iinfo(torch.long).max
    candidates = position.masked_fill(on_steps < most[pattern], far)
    steadiest = torch.full_like(with_sink, far).scatter_reduce_(0, pattern, candidates, "amin")
    share = most.double() / with_sink.clamp(min=1)
    return steadiest.masked_fill(with_sink == 0, -1), share.masked_fill(with_sink == 0, torch.nan)


def _switches(on: Tensor, main: Tensor) -> Tensor:
    """Whether the largest sink changed since the step before, while the old and the new one are active at both."""
    switched = torch.zeros_like(main, dtype=torch.bool)
    before, after = main[:-1], main[1:]
    both = (before >= 0) & (after >= 0) & (before != after)
    new_was_on = on[:-1].gather(-1, after.clamp(min=0)[..., None])[..., 0]
    old_is_on = on[1:].gather(-1, before.clamp(min=0)[..., None])[..., 0]
    switched[1:] = both & new_was_on & old_is_on
    return switched


def _intervals_of(
    columns: Tensor, values: Tensor, pattern: Tensor, position: Tensor, main: Tensor, defined: Tensor
) -> SinkLifetimes:
    on, scores = columns.T, values.T.double()
    off = on.new_zeros(len(on), 1)
    starts = on & ~torch.cat([off, on[:, :-1]], 1)
    ends = on & ~torch.cat([on[:, 1:], off], 1)
    column, first = starts.nonzero(as_tuple=True)
    last = ends.nonzero(as_tuple=True)[1]
    # Every active entry belongs to the last interval that began in its column.
    life = (starts.flatten().cumsum(0) - 1)[on.flatten()]
    inside = scores[on]
    total = torch.zeros(len(first), dtype=torch.double).index_add_(0, life, inside)
    peak = torch.full((len(first),), -torch.inf, dtype=torch.double).scatter_reduce_(0, life, inside, "amax")
    step = torch.arange(on.shape[1]).expand_as(on)[on]
    at_peak = step.masked_fill(inside < peak[life], on.shape[1])
    peak_step = torch.full_like(first, on.shape[1]).scatter_reduce_(0, life, at_peak, "amin")
    leads = (main.T[pattern] == position[:, None])[on]
    main_steps = torch.zeros_like(first).index_add_(0, life, leads.long())
    owner = pattern[column]
    seen = torch.nn.functional.pad(defined, (0, 0, 1, 1))
    return SinkLifetimes(
        pattern=owner.numpy(),
        position=position[column].numpy(),
        first=first.numpy(),
        last=last.numpy(),
        peak=peak.numpy(),
        mean=(total / (last - first + 1)).numpy(),
        peak_step=peak_step.numpy(),
        main_steps=main_steps.numpy(),
        born=seen[first, owner].numpy(),
        died=seen[last + 2, owner].numpy(),
    )


WITHIN = 1
"""A sink moves if the end of one interval and the onset of another are at most this many steps apart."""


def link_lifetimes(lifetimes: SinkLifetimes, movable: np.ndarray) -> tuple[Ints, Ints]:
    """Link lifetimes by moves: the predecessor of each lifetime, and the trajectory that it belongs to.

    Lifetime B continues lifetime A of the same pattern if B is at another position, the onset of B is at most one
    step before or after the end of A, and B begins and ends later than A. If several pairs fit, the smallest
    difference in time comes first, then the smallest distance, then the earlier and the left one; a lifetime has at
    most one predecessor and one successor. An onset at the first step, or an end at the last, was not observed and
    takes no part.

    Args:
        lifetimes: all lifetimes.
        movable: which of them are at canvas positions; a learned sink token cannot move.

    Returns:
        For every lifetime its predecessor (-1: none) and its trajectory, counted in the order of first lifetimes.
    """
    before = np.full(len(lifetimes), -1, dtype=np.int64)
    ends, onsets = np.flatnonzero(lifetimes.died & movable), np.flatnonzero(lifetimes.born & movable)
    death, birth = _candidates(lifetimes, ends, onsets)
    fits = (
        (lifetimes.position[death] != lifetimes.position[birth])
        & (lifetimes.first[birth] > lifetimes.first[death])
        & (lifetimes.last[birth] > lifetimes.last[death])
    )
    death, birth = death[fits], birth[fits]
    delay = lifetimes.first[birth] - lifetimes.last[death] - 1
    distance = np.abs(lifetimes.position[birth] - lifetimes.position[death])
    order = np.lexsort((lifetimes.position[birth], lifetimes.position[death], delay, distance, np.abs(delay)))
    death, birth = death[order], birth[order]
    while len(death):
        # Takes the pairs that a greedy pass down the sorted list would take: the best left for both members.
        best = np.zeros(len(death), dtype=bool)
        best[np.unique(death, return_index=True)[1]] = True
        best_birth = np.zeros(len(death), dtype=bool)
        best_birth[np.unique(birth, return_index=True)[1]] = True
        taken = best & best_birth
        before[birth[taken]] = death[taken]
        left = ~(np.isin(death, death[taken]) | np.isin(birth, birth[taken]))
        death, birth = death[left], birth[left]
    return before, _trajectories(before)


def _candidates(lifetimes: SinkLifetimes, deaths: Ints, births: Ints) -> tuple[Ints, Ints]:
    """All pairs of an end and an onset in one pattern at most WITHIN steps apart."""
    if not len(deaths) or not len(births):
        return deaths[:0], births[:0]
    width = int(lifetimes.last.max()) + 2 * WITHIN + 3
    key = lifetimes.pattern[births] * width + lifetimes.first[births] + WITHIN
    order = np.argsort(key, kind="stable")
    off = lifetimes.pattern[deaths] * width + lifetimes.last[deaths] + 1 + WITHIN
    low = np.searchsorted(key[order], off - WITHIN, side="left")
    high = np.searchsorted(key[order], off + WITHIN, side="right")
    found = high - low
    pairs = np.arange(found.sum()) - np.repeat(np.cumsum(found) - found, found) + np.repeat(low, found)
    return np.repeat(deaths, found), births[order][pairs]


def _trajectories(before: Ints) -> Ints:
    """The index of the trajectory of every lifetime: of the first lifetime in its chain of predecessors."""
    root = np.where(before < 0, np.arange(len(before)), before)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return np.unique(root, return_inverse=True)[1].astype(np.int64)


STATIC_SHARE = 0.9
"""Static: one position is active in at least this share of the steps that have a sink."""

TRANSIENT_STEPS = 2
"""Transient: a lifetime that was seen to end after at most this many steps; the run's end cuts long ones too."""

KINDS = ("none", "static", "moving", "unsettled")
"""No sink at any step; static; not static and a sink moved; neither (sinks appear and vanish without a move)."""


def count_lifetimes(lifetimes: SinkLifetimes, before: Ints, trajectory: Ints, patterns: int) -> dict[str, Floats]:
    """Per pattern: counts of lifetimes, trajectories and moves, the transient share, mean lifetime and distance."""

    def per_pattern(weights: NDArray[np.generic]) -> Floats:
        return np.asarray(
            np.bincount(lifetimes.pattern, weights=weights.astype(float), minlength=patterns), dtype=float
        )

    moved = before >= 0
    jump = np.where(moved, lifetimes.position - lifetimes.position[before], 0)
    owners = lifetimes.pattern[np.unique(trajectory, return_index=True)[1]]
    count, moves = per_pattern(np.ones(len(lifetimes))), per_pattern(moved)
    with np.errstate(invalid="ignore"):
        return {
            "lives": count,
            "trajectories": np.bincount(owners, minlength=patterns).astype(float),
            "life": per_pattern(lifetimes.steps) / count,
            "transient": per_pattern(lifetimes.transient)
            / per_pattern(lifetimes.died | (lifetimes.steps > TRANSIENT_STEPS)),
            "moves": moves,
            "moves_right": per_pattern(jump > 0) / moves,
            "jump": per_pattern(np.abs(jump)) / moves,
        }


def main_path(main: Ints, canvas: int, defined: Bools, numbers: Sequence[int]) -> dict[str, Floats]:
    """Statistics of the position of the largest sink over the steps ([step, pattern]; -1: none).

    `numbers` are those of the steps in the run, the times of the line that gives the drift: a part of a run may
    leave steps out. `drift` is the slope of the least-squares line of position over step, in positions per step
    (to the right above 0); `displacement` the last position minus the first; `variance` the population's over
    steps, in positions^2; `changes` how often the position differs between neighbouring steps that both have a
    sink, `change` by how much. `moved_over_run` compares the first step with the last of those that are `defined`
    (NaN where either has no sink).
    """
    there = (main >= 0) & (main < canvas)
    steps = np.asarray(numbers)[:, None]
    count = there.sum(0)
    at = np.where(there, main, 0).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, middle = at.sum(0) / count, (there * steps).sum(0) / count
        off, time = np.where(there, at - mean, 0), np.where(there, steps - middle, 0)
        spread = (time**2).sum(0)
        drift = np.where(count > 1, (off * time).sum(0) / spread, np.nan)
        variance = (off**2).sum(0) / count
        pairs = there[1:] & there[:-1]
        step_sizes = np.where(pairs, np.abs(np.diff(at, axis=0)), 0)
        changes = (step_sizes > 0).sum(0).astype(float)
        change = step_sizes.sum(0) / changes
    first, last = there.argmax(0), len(main) - 1 - there[::-1].argmax(0)
    pattern = np.arange(main.shape[1])
    displacement = np.where(count > 0, at[last, pattern] - at[first, pattern], np.nan)
    begin, end = main[defined.argmax(0), pattern], main[len(main) - 1 - defined[::-1].argmax(0), pattern]
    ends = (begin >= 0) & (end >= 0)
    return {
        "moved_over_run": np.where(ends, begin != end, np.nan),
        "displacement": displacement,
        "drift": drift,
        "variance": variance,
        "changes": changes,
        "change": change,
    }


def kinds_of(sink_steps: Ints, static_share: Floats, moves: Floats) -> NDArray[np.str_]:
    """One of `KINDS` per pattern."""
    static: Bools = static_share >= STATIC_SHARE
    return np.select([sink_steps == 0, static, moves > 0], KINDS[:3], KINDS[3])
