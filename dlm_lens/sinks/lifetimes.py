"""When each position of a pattern is a sink: hysteresis over steps, and the lives that come of it."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.sinks.rules import Detector, Hysteretic

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Lives:
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

    lives: Lives
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
        TypeError: the detector does not say what a lower threshold is.
    """
    on = detector.detect(scores) if entered is None else entered.clone()
    if hysteresis == 1.0:
        return on
    if not isinstance(detector, Hysteretic):
        raise TypeError(f"{detector!r} has no method `holds(scores, factor)`; give hysteresis=1.0 to do without")
    holds = detector.holds(scores, hysteresis)
    for step in range(1, len(on)):
        on[step] |= on[step - 1] & holds[step]
    return on


def follow(scores: Float[Tensor, "step pattern key"], on: Bool[Tensor, "step pattern key"]) -> Followed:
    """Lives, largest sinks, switches and the most steady position of patterns whose sinks are `on`."""
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
) -> Lives:
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
    return Lives(
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
