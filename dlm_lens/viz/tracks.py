"""Where the largest sink of one pattern is at every step, whatever it is read from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.recording import Recording
from dlm_lens.sinks import AboveMean, Detector, Level, Received, Sinks, Trajectories, find_sinks, trajectories
from dlm_lens.viz.choice import as_received, choose, index_of, level_of

Source = Received | Recording | Sinks | Trajectories


@dataclass(frozen=True)
class Track:
    """What the picture shows of one pattern: per step the largest key (-1: none defined) and if it passes."""

    largest: list[int]
    passes: list[bool]
    masked: Bool[Tensor, "step key"] | None
    content: list[int]
    tokens: list[int] | None
    tokenizer: Any
    rule: str
    level: Level
    sinks: int


def track_of(given: Source, detector: Detector | None, layer: int | None, head: int | None, row: int) -> Track:
    """The track of one layer, head and row.

    Raises:
        TypeError: something without steps, or a detector beside what was already judged.
        ValueError: a layer, head or row that is not there, or another level.
    """
    if isinstance(given, Sinks | Trajectories):
        if detector is not None:
            raise TypeError(
                f"these {type(given).__name__} were found by {given.detector}; a detector goes with a Received"
            )
        return (
            _of_sinks(given, layer, head, row) if isinstance(given, Sinks) else _followed(given, layer, head, row)
        )
    shown = choose(given, layer, head, row)
    rule = AboveMean(3.0) if detector is None else detector
    found = find_sinks(shown.received, rule, level=shown.level)
    return _track(found, {}, shown.content.tolist(), shown.final)


def followed(given: Source, detector: Detector | None) -> Trajectories:
    """The paths of the sinks, by the rule of `track_of`.

    Raises:
        TypeError: something without steps, or a detector beside what was already judged.
    """
    if isinstance(given, Trajectories):
        return given
    if isinstance(given, Sinks):
        return trajectories(given, detector)
    return trajectories(as_received(given), AboveMean(3.0) if detector is None else detector)


def _of_sinks(sinks: Sinks, layer: int | None, head: int | None, row: int) -> Track:
    """One layer, head and row of Sinks."""
    if "step" not in sinks.dims:
        raise TypeError(f"{sinks!r} has no steps to follow; give a Received or Sinks with a step axis")
    _check_level("Sinks", sinks.level, layer, head)
    sizes = dict(zip(sinks.dims, sinks.is_sink.shape, strict=True))
    wanted: dict[str, tuple[int | None, Sequence[int]]] = {
        "batch": (row, range(sizes.get("batch", 1))),
        "layer": (layer, sinks.layers),
        "head": (head, range(sizes.get("head", 1))),
    }
    place = {n: index_of(n, i, there) for n, (i, there) in wanted.items() if n in sizes and i is not None}
    there = (~_at(sinks.scores, sinks.dims, place).isnan()).any(0)
    if sinks.masked is not None:
        there = there | _at(sinks.masked, _rows(sinks), place).any(0)
    tokens = None if sinks.tokens is None else _at(sinks.tokens, _rows(sinks), place)[-1].tolist()
    return _track(sinks, place, there.nonzero().flatten().tolist(), tokens)


def _track(sinks: Sinks, place: dict[str, int], content: list[int], tokens: list[int] | None) -> Track:
    scores = _at(sinks.scores, sinks.dims, place)
    is_sink = _at(sinks.is_sink, sinks.dims, place)
    largest = scores.nan_to_num(nan=-torch.inf).argmax(-1)
    passes = is_sink.gather(-1, largest[:, None]).squeeze(-1)
    return Track(
        largest=largest.masked_fill(scores.isnan().all(-1), -1).tolist(),
        passes=passes.tolist(),
        masked=None if sinks.masked is None else _at(sinks.masked, _rows(sinks), place),
        content=content,
        tokens=tokens,
        tokenizer=sinks.tokenizer,
        rule=f"{sinks.detector}; scale: {sinks.scale}; queries: {sinks.queries}",
        level=sinks.level,
        sinks=sinks.sinks,
    )


def _followed(paths: Trajectories, layer: int | None, head: int | None, row: int) -> Track:
    """One layer, head and row of Trajectories, whose largest key is known where it is a sink."""
    _check_level("Trajectories", paths.level, layer, head)
    layers = 0 if layer is None else index_of("layer", layer, paths.layers)
    heads = 0 if head is None else index_of("head", head, range(paths.main.shape[3]))
    row = index_of("row", row, range(paths.main.shape[1]))
    largest = paths.main[:, row, layers, heads].tolist()
    there = paths.scored[:, row].any(0)
    masked = None if paths.masked is None else paths.masked[:, row]
    if masked is not None:
        there = there | masked.any(0)
    final = paths.final_tokens
    if final is None and paths.tokens is not None:
        final = paths.tokens[-1]
    return Track(
        largest=largest,
        passes=[position >= 0 for position in largest],
        masked=masked,
        content=there.nonzero().flatten().tolist(),
        tokens=None if final is None else final[row].tolist(),
        tokenizer=paths.tokenizer,
        rule=f"{paths.detector}; scale: {paths.scale}; queries: {paths.queries}",
        level=paths.level,
        sinks=paths.sinks,
    )


def _check_level(what: str, level: Level, layer: int | None, head: int | None) -> None:
    if level_of(layer, head) != level:
        raise ValueError(
            f"these {what} are of level {level!r}, but layer={layer}, head={head} asks for "
            f"{level_of(layer, head)!r}; find_sinks again with level="
        )


def _rows(sinks: Sinks) -> tuple[str, ...]:
    return tuple(name for name in sinks.dims if name not in ("layer", "head"))


def _at(tensor: Tensor, dims: Sequence[str], place: dict[str, int]) -> Tensor:
    """[step, key] of a tensor with more axes."""
    return tensor[tuple(slice(None) if name in ("step", "key") else place.get(name, 0) for name in dims)]
