"""`trajectories`: follow the sinks of every pattern through the steps of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import LEVEL, checked_arguments, shown
from dlm_lens.recording import Recording
from dlm_lens.sinks.lifetimes import Followed, Lives, follow, switch_on
from dlm_lens.sinks.linking import link_lives
from dlm_lens.sinks.paths import Trajectories
from dlm_lens.sinks.received import AXES, Level, Received, Scale
from dlm_lens.sinks.recorded import received_of
from dlm_lens.sinks.result import Sinks
from dlm_lens.sinks.rules import Detector

HYSTERESIS = 0.75
"""A sink that is on switches off below this part of its threshold eps."""

ENTRIES_AT_ONCE = 2**20
"""Scores in work at a time, 4 MiB in float32: what is made of them needs no fresh memory for every piece."""


@checked_arguments(level=LEVEL)
def trajectories(
    sinks: Received | Recording | Sinks,
    detector: Detector | None = None,
    *,
    level: Level = "head",
    hysteresis: float = HYSTERESIS,
) -> Trajectories:
    """Follow sinks over steps: when each appears, moves and vanishes, in every pattern (2510.15731, section 4.2).

    A position switches on when the detector finds it and off when it falls below the detector's threshold with
    eps times `hysteresis` (k for `AboveStd`, x for `Share`). A spell of being on is a **life**. A sink **moved**
    if a position switches off within one step of another switching on; lives joined by moves are one trajectory.
    A pattern is **static** if one position is on in at least 90% of the steps that have a sink, **moving** if it
    is not static and a sink moved. A life of at most 2 steps is **transient**. A change of the largest sink
    between two that both stay on is a **switch**, no move.

    A step without any score (a class of queries that ran out) belongs to no life, and a life that ends in front
    of it was not seen to switch off. Works through the input piece by piece, also where that is a memory map.

    Args:
        sinks: a `Received` with a step axis, or a `Recording` (of all queries; `received_of` for others), and a
            detector, which takes less memory; or `Sinks`.
        detector: the rule for a `Received` or a `Recording`; `Sinks` have theirs.
        level: of a `Received`: follow the sinks of every "head", of the head-mean pattern of a "layer", or of the
            "model" mean. `Sinks` have theirs.
        hysteresis: part of the threshold below which a sink switches off; 1 for none.

    Raises:
        TypeError: neither of the two, no detector, a second one, or one without `holds`.
        ValueError: there is no step axis, hysteresis is not in (0, 1], or a level that is not there.
    """
    if not 0 < hysteresis <= 1:
        raise ValueError(f"hysteresis is {hysteresis}; it is a part of the threshold, above 0 and at most 1")
    source = _source(sinks, detector, level)
    if "step" not in source.dims:
        raise ValueError(f"the sinks have the axes {source.dims}; trajectories need a step axis")
    shape = source.scores.shape
    found = [
        (index, follow(scores, switch_on(scores, source.detector, hysteresis, entered)))
        for index, scores, entered in source.pieces()
    ]
    lives = _joined([(index, piece.lives) for index, piece in found])
    gathered: dict[str, Any] = {name: _gathered(found, name, shape) for name in _PER_STEP + _PER_PATTERN}
    before, trajectory = link_lives(lives, lives.position < shape[-1] - source.context["sinks"])
    return Trajectories(
        lives=lives,
        before=before,
        trajectory=trajectory,
        **gathered,
        scored=source.scored(),
        scale=source.scale,
        detector=source.detector,
        hysteresis=hysteresis,
        dims=tuple(name for name in source.dims if name != "key"),
        **source.context,
    )


_CARRIED = ("sinks", "tokenizer", "padding")
_PER_STEP = ("main", "main_score", "counts", "defined", "switched")
_PER_PATTERN = ("static_position", "static_share")


@dataclass(frozen=True)
class _Source:
    """Scores on all five axes, and what is known of them."""

    scores: Float[Tensor, "step batch layer head key"]
    received: Received | None
    entered: Bool[Tensor, "step batch layer head key"] | None
    scale: Scale
    detector: Detector
    dims: tuple[str, ...]
    context: dict[str, Any]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Some patterns at a time: their indices over (batch, layer, head), scores and detections."""
        steps, batch, layers, heads, keys = self.scores.shape
        index = torch.arange(batch * layers * heads).view(batch, layers, heads)
        room = max(1, ENTRIES_AT_ONCE // max(1, steps * keys))
        heads_at_once = min(room, heads)
        layers_at_once = min(max(1, room // heads), layers)
        rows_at_once = min(max(1, room // (heads * layers)), batch)
        for row, layer, head in product(
            range(0, batch, rows_at_once), range(0, layers, layers_at_once), range(0, heads, heads_at_once)
        ):
            part = (
                slice(row, row + rows_at_once),
                slice(layer, layer + layers_at_once),
                slice(head, head + heads_at_once),
            )
            entered = None if self.entered is None else self.entered[:, *part].flatten(1, 3)
            yield index[part].flatten(), self._read(part).float().flatten(1, 3), entered

    def _read(self, part: tuple[slice, slice, slice]) -> Tensor:
        if self.received is None:
            return self.scores[:, *part]
        return self.received.part(*part).read(self.detector.quantity)[0]

    def scored(self) -> Bool[Tensor, "step batch key"]:
        """Which keys have a score in any pattern."""
        scored = torch.zeros(*self.scores.shape[:2], self.scores.shape[-1], dtype=torch.bool)
        for layer in range(self.scores.shape[2]):
            for head in range(self.scores.shape[3]):
                scored |= ~self.scores[:, :, layer, head].isnan()
        return scored


def _source(sinks: Any, detector: Detector | None, level: Level) -> _Source:
    if isinstance(sinks, Recording):
        sinks = received_of(sinks)
    if isinstance(sinks, Received):
        if isinstance(detector, type) or not isinstance(detector, Detector):
            raise TypeError(f"a Received needs a detector such as AboveMean(eps=3.0), not {shown(detector)}")
        received = sinks.at_level(level)
        scale = received.part(slice(0, 0)).read(detector.quantity)[1]
        context = {
            name: getattr(received, name)
            for name in (
                "tokens",
                "masked",
                "final_tokens",
                "level",
                "layers",
                "queries",
                "sinks",
                "tokenizer",
                "padding",
            )
        }
        return _Source(received.values, received, None, scale, detector, received.dims, context)
    if not isinstance(sinks, Sinks):
        raise TypeError(f"trajectories of a {type(sinks).__name__}; give a Received and a detector, or Sinks")
    if getattr(sinks.detector, "low_is_strong", False):
        raise TypeError(f"{sinks.detector} has sinks with low scores; trajectories follow high ones")
    if detector is not None or level not in ("head", sinks.level):
        raise TypeError(
            f"these Sinks were found by {sinks.detector} at level {sinks.level}, which stay as they are"
        )
    context = {
        "tokens": _widened(sinks.tokens, sinks.dims, ("step", "batch", "key")),
        "masked": _widened(sinks.masked, sinks.dims, ("step", "batch", "key")),
        "final_tokens": None,
        **{name: getattr(sinks, name) for name in ("level", "layers", "queries", *_CARRIED)},
    }
    scores, entered = (_widened(tensor, sinks.dims, AXES) for tensor in (sinks.scores, sinks.is_sink))
    return _Source(scores, None, entered, sinks.scale, sinks.detector, sinks.dims, context)


def _widened(tensor: Any, dims: tuple[str, ...], axes: tuple[str, ...]) -> Any:
    """Put axes of size 1 back where `dims` has none."""
    if tensor is not None:
        for place, name in enumerate(axes):
            tensor = tensor if name in dims else tensor.unsqueeze(place)
    return tensor


def _joined(pieces: list[tuple[Tensor, Lives]]) -> Lives:
    """The lives of all pieces in one list, ordered by pattern, first step and position."""
    owners = np.concatenate([index.numpy()[lives.pattern] for index, lives in pieces])
    values = {
        name.name: np.concatenate([getattr(lives, name.name) for _, lives in pieces]) for name in fields(Lives)
    }
    values["pattern"] = owners
    order = np.lexsort((values["position"], values["first"], owners))
    return Lives(**{name: value[order] for name, value in values.items()})


def _gathered(found: list[tuple[Tensor, Followed]], name: str, shape: tuple[int, ...]) -> Tensor:
    """One quantity of all pieces, on the axes (step,) batch, layer, head."""
    index = torch.cat([index for index, _ in found])
    values = torch.cat([getattr(piece, name) for _, piece in found], -1)
    ordered = torch.empty_like(values)
    ordered[..., index] = values
    return ordered.unflatten(-1, shape[1:4])
