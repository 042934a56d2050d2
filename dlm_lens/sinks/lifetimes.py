"""When each position of a pattern is a sink: hysteresis over steps, lifetimes, and how they link."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.sinks.detectors.base import Detector
from dlm_lens.sinks.statistics import Floats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class SinkLifetimes:
    """Spells during which one position is a sink, one entry each; ordered by pattern, position and step.

    Args:
        pattern: which pattern, an index over (batch, layer, head).
        position: the key.
        first, last: its first and last step as a sink.
        peak, mean: largest and mean score.
        peak_step: step of the largest score (the first of equals).
        main_steps: at how many of its steps it was the pattern's largest sink.
        born: it was seen to switch on; False at the first step and behind steps without any score.
        died: it was seen to switch off; False at the last step and in front of steps without any score.
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
        """How many steps each life has."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class Followed:
    """What happened in some patterns, from `follow`."""

    lives: SinkLifetimes
    main: Int[Tensor, "step pattern"]
    main_score: Float[Tensor, "step pattern"]
    counts: Int[Tensor, "step pattern"]
    defined: Bool[Tensor, "step pattern"]
    switched: Bool[Tensor, "step pattern"]
    static_position: Int[Tensor, "pattern"]
    static_share: Float[Tensor, "pattern"]


def switch_on(
    scores: Float[Tensor, "step pattern key"],
    detector: Detector,
    hysteresis: float,
    entered: Bool[Tensor, "step pattern key"] | None = None,
) -> Bool[Tensor, "step pattern key"]:
    """Which keys are on: from the step that passes the detector to the last that does not fall below its part.

    on_t = detect_t or (on_{t-1} and holds_t), where `holds` is the threshold with eps times `hysteresis`. `entered`
    is what the detector found, where that is known.

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


def follow(scores: Float[Tensor, "step pattern key"], on: Bool[Tensor, "step pattern key"]) -> Followed:
    """Lifetimes, largest sinks, switches and the most steady position of patterns whose sinks are `on`."""
    steps, patterns, _ = scores.shape
    defined = ~scores.isnan().all(-1)
    # Few columns are ever sinks: everything below looks at those alone.
    pattern, position = on.any(0).nonzero(as_tuple=True)
    columns, values = on[:, pattern, position], scores[:, pattern, position]
    counts = torch.zeros(steps, patterns, dtype=torch.long).index_add_(1, pattern, columns.long())
    main, best = _largest(columns, values, pattern, position, patterns)
    static_position, static_share = _steadiest(columns.sum(0), pattern, position, (counts > 0).sum(0))
    lives = _lives(columns, values, pattern, position, main, defined)
    return Followed(lives, main, best, counts, defined, _switches(on, main, counts), static_position, static_share)


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


def _steadiest(on_steps: Tensor, pattern: Tensor, position: Tensor, with_sink: Tensor) -> tuple[Tensor, Tensor]:
    """The position that is on most, and in which part of the steps that have a sink."""
    most = torch.zeros_like(with_sink).scatter_reduce_(0, pattern, on_steps, "amax")
    far = torch.iinfo(torch.long).max
    candidates = position.masked_fill(on_steps < most[pattern], far)
    steadiest = torch.full_like(with_sink, far).scatter_reduce_(0, pattern, candidates, "amin")
    share = most.double() / with_sink.clamp(min=1)
    return steadiest.masked_fill(with_sink == 0, -1), share.masked_fill(with_sink == 0, torch.nan)


def _switches(on: Tensor, main: Tensor, counts: Tensor) -> Tensor:
    """Whether the largest sink is another than a step before, while the old and the new one are both on at both."""
    switched = torch.zeros_like(main, dtype=torch.bool)
    before, after = main[:-1], main[1:]
    both = (before >= 0) & (after >= 0) & (before != after)
    new_was_on = on[:-1].gather(-1, after.clamp(min=0)[..., None])[..., 0]
    old_is_on = on[1:].gather(-1, before.clamp(min=0)[..., None])[..., 0]
    switched[1:] = both & new_was_on & old_is_on
    return switched


def _lives(
    columns: Tensor, values: Tensor, pattern: Tensor, position: Tensor, main: Tensor, defined: Tensor
) -> SinkLifetimes:
    on, scores = columns.T, values.T.double()
    off = on.new_zeros(len(on), 1)
    starts = on & ~torch.cat([off, on[:, :-1]], 1)
    ends = on & ~torch.cat([on[:, 1:], off], 1)
    column, first = starts.nonzero(as_tuple=True)
    last = ends.nonzero(as_tuple=True)[1]
    # Every entry that is on belongs to the life that began last in its column.
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
"""A sink moves if one position switches off within this many steps of another switching on."""


def link_lives(lives: SinkLifetimes, movable: np.ndarray) -> tuple[Ints, Ints]:
    """The moves: which life each life comes from, and the trajectory that it belongs to.

    Life B continues life A of the same pattern if B's position is another, B switches on at most one step before
    or after A switches off, and B begins and ends later than A. Where several fit, the smallest difference in time
    wins, then the smallest distance, then the earlier and the left one; a life has at most one predecessor and one
    successor. A life that begins with the run, or ends with it, was not seen to switch.

    Args:
        lives: all lives.
        movable: which of them stand on the canvas; a learned sink token cannot have moved.

    Returns:
        For every life its predecessor (-1: none) and its trajectory, counted in the order of first lives.
    """
    before = np.full(len(lives), -1, dtype=np.int64)
    death, birth = _candidates(lives, np.flatnonzero(lives.died & movable), np.flatnonzero(lives.born & movable))
    fits = (
        (lives.position[death] != lives.position[birth])
        & (lives.first[birth] > lives.first[death])
        & (lives.last[birth] > lives.last[death])
    )
    death, birth = death[fits], birth[fits]
    delay = lives.first[birth] - lives.last[death] - 1
    distance = np.abs(lives.position[birth] - lives.position[death])
    order = np.lexsort((lives.position[birth], lives.position[death], delay, distance, np.abs(delay)))
    death, birth = death[order], birth[order]
    while len(death):
        # A pair that is the best one left for both of its lives is what going down the list would take.
        best = np.zeros(len(death), dtype=bool)
        best[np.unique(death, return_index=True)[1]] = True
        best_birth = np.zeros(len(death), dtype=bool)
        best_birth[np.unique(birth, return_index=True)[1]] = True
        taken = best & best_birth
        before[birth[taken]] = death[taken]
        left = ~(np.isin(death, death[taken]) | np.isin(birth, birth[taken]))
        death, birth = death[left], birth[left]
    return before, _trajectories(before)


def _candidates(lives: SinkLifetimes, deaths: Ints, births: Ints) -> tuple[Ints, Ints]:
    """All pairs of a death and a birth in one pattern at most WITHIN steps apart."""
    if not len(deaths) or not len(births):
        return deaths[:0], births[:0]
    width = int(lives.last.max()) + 2 * WITHIN + 3
    key = lives.pattern[births] * width + lives.first[births] + WITHIN
    order = np.argsort(key, kind="stable")
    off = lives.pattern[deaths] * width + lives.last[deaths] + 1 + WITHIN
    low = np.searchsorted(key[order], off - WITHIN, side="left")
    high = np.searchsorted(key[order], off + WITHIN, side="right")
    found = high - low
    pairs = np.arange(found.sum()) - np.repeat(np.cumsum(found) - found, found) + np.repeat(low, found)
    return np.repeat(deaths, found), births[order][pairs]


def _trajectories(before: Ints) -> Ints:
    """Follow every life back to the one that it comes from in the end."""
    root = np.where(before < 0, np.arange(len(before)), before)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return np.unique(root, return_inverse=True)[1].astype(np.int64)


STATIC_SHARE = 0.9
"""Static: one position is on in at least this part of the steps that have a sink."""

TRANSIENT_STEPS = 2
"""Transient: a life of at most so many steps."""

KINDS = ("none", "static", "moving", "unsettled")
"""No sink at any step; static; not static and a sink moved; neither (sinks come and go without a move)."""


def life_counts(lives: SinkLifetimes, before: Ints, trajectory: Ints, patterns: int) -> dict[str, Floats]:
    """Numbers of lives, trajectories, transients and moves per pattern, and the mean length of lives and moves."""

    def per_pattern(weights: NDArray[np.generic]) -> Floats:
        return np.asarray(
            np.bincount(lives.pattern, weights=weights.astype(float), minlength=patterns), dtype=float
        )

    moved = before >= 0
    jump = np.where(moved, lives.position - lives.position[before], 0)
    owners = lives.pattern[np.unique(trajectory, return_index=True)[1]]
    count, moves = per_pattern(np.ones(len(lives))), per_pattern(moved)
    with np.errstate(invalid="ignore"):
        return {
            "lives": count,
            "trajectories": np.bincount(owners, minlength=patterns).astype(float),
            "life": per_pattern(lives.steps) / count,
            "transient": per_pattern(lives.steps <= TRANSIENT_STEPS) / count,
            "moves": moves,
            "moves_right": per_pattern(jump > 0) / moves,
            "jump": per_pattern(np.abs(jump)) / moves,
        }


def main_path(main: Ints, canvas: int, defined: Bools) -> dict[str, Floats]:
    """Where the largest sink is over the steps ([step, pattern]; -1: none); steps without one are left out.

    `drift` is the slope of the least-squares line of position over step, in positions per step (to the right above
    0); `displacement` the last position minus the first; `variance` the population's over steps, in positions^2;
    `changes` how often the position differs between neighbouring steps that both have a sink, `change` by how much.
    `moved_over_run` compares the first step with the last of those that are `defined` (NaN where either has no
    sink).
    """
    there = (main >= 0) & (main < canvas)
    steps = np.arange(len(main))[:, None]
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
