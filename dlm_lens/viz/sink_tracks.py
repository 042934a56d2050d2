"""The largest key of one pattern at every step, from received attention, `Sinks` or `Trajectories`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.arguments import chosen_indices, meant
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.denoising_run import check_run, holds_random_tokens
from dlm_lens.sampling.emerging_text import changed_on_canvas
from dlm_lens.sampling.moved_tokens import at_places, history_places
from dlm_lens.sinks import AboveMean, Detector, Level, Received, Sinks, Trajectories, find_sinks, trajectories
from dlm_lens.sinks.followed_tokens import FOLLOWED_TOKENS
from dlm_lens.sinks.key_axes import Follow
from dlm_lens.viz.selection import as_received, check_queries, choose, index_of, level_of, row_number

Source = Received | Recording | Sinks | Trajectories


@dataclass(frozen=True)
class Track:
    """The largest key of one pattern at every step, and whether it is a sink.

    Keys count from the row's first token.

    Args:
        largest: the key with the highest score at each step (of rules whose sinks have low scores, such as
            `LowKeyNorm`, the lowest); -1 where no key has one.
        passes: whether that key is a sink.
        masked: which keys are open (masked, or holding a random token); None if unknown.
        content: the keys that are not padding.
        tokens: the final token ids; None if unknown.
        tokenizer: decodes token ids.
        rule: rule, scale and queries in words.
        level: head, layer or model.
        sinks: how many of the keys, the last ones, are learned sink tokens.
        running: which steps the row ran; it has ended at the others.
        padding: number of padding positions before the row's first token.
        uniform_noise: whether open keys hold random tokens.
        low: whether the rule's sinks have low scores.
        steps: the number of each step in its run; empty for 0, 1, ....
        row: number of the sequence in its recording.
        layers: the layers that a mean is over; empty where they are not known.
        heads: the heads that a mean is over, where they are known not to be all of the model's; else empty.
        scored: whether any key has a score.
        follow: whether keys are positions or, as `trajectories` follows them, tokens.
        places: of tokens, the canvas position of each at each step, padding included; -1 for none. None if unknown.
    """

    largest: list[int]
    passes: list[bool]
    masked: Bool[Tensor, "step key"] | None
    content: list[int]
    tokens: list[int] | None
    tokenizer: Any
    rule: str
    level: Level
    sinks: int
    running: list[bool]
    padding: int = 0
    uniform_noise: bool = False
    low: bool = False
    steps: tuple[int, ...] = ()
    row: int = 0
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    scored: bool = True
    follow: Follow = "position"
    places: Int[Tensor, "step key"] | None = None

    def from_first_token(self, padding: int) -> "Track":
        """The same track with keys that count from the row's first token instead of the canvas's."""
        return replace(
            self,
            largest=[key - padding if key >= 0 else key for key in self.largest],
            masked=None if self.masked is None else self.masked[:, padding:],
            content=[key - padding for key in self.content],
            tokens=None if self.tokens is None else self.tokens[padding:],
            padding=padding,
        )

    def blocks(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int] | None]:
        """The part of each step's block in this row, as (start, stop); None where the row has ended.

        Raises:
            ValueError: keys are tokens whose places are not known.
        """
        if self.follow == "token":
            places = self._known_places("blocks")
            inside = [(at >= start) & (at < stop) for at, (start, stop) in zip(places, spans, strict=True)]
            keys = [each.nonzero().flatten().tolist() for each in inside]
            ran = zip(keys, self.running, strict=True)
            return [(found[0], found[-1] + 1) if found and here else None for found, here in ran]
        canvas = self.content[: len(self.content) - self.sinks]
        low, high = (min(canvas), max(canvas) + 1) if canvas else (0, 0)
        own = [(max(start - self.padding, low), min(stop - self.padding, high)) for start, stop in spans]
        return [span if here and span[0] < span[1] else None for span, here in zip(own, self.running, strict=True)]

    def marks(self, chosen: Bool[Tensor, "step position"] | None) -> list[tuple[int, int]]:
        """The (step, key) of chosen canvas positions, with keys that count from the row's first token.

        Raises:
            ValueError: of another number of steps, or keys are tokens whose places are not known.
        """
        if chosen is None:
            return []
        if len(chosen) != len(self.largest):
            raise ValueError(
                f"revised has {len(chosen)} steps, the figure has {len(self.largest)}; give run.revised[:, row] of "
                "its run"
            )
        if self.follow == "token":
            chosen = at_places(chosen[:, None], self._known_places("revised")[:, None], False)[:, 0]
            return [(step, key) for step, key in chosen.nonzero().tolist()]
        return [(step, position - self.padding) for step, position in chosen.nonzero().tolist()]

    def _known_places(self, given: str) -> Int[Tensor, "step key"]:
        if self.places is None:
            raise ValueError(
                f"{given} is of canvas positions, and these Trajectories are of tokens; leave it out, or give the "
                'recording and follow="token"'
            )
        return self.places


def revised_of(given: Source, row: int) -> Bool[Tensor, "step position"] | None:
    """Which decided tokens of a row each step of a recording rewrote or opened again; None for other inputs."""
    return changed_on_canvas(given.run, row)[1] if isinstance(given, Recording) else None


def row_blocks(run: DenoisingRun, row: int) -> list[tuple[int, int]]:
    """The block of a row at each step of its run, as (start, stop) canvas positions; empty where it has ended.

    Raises:
        TypeError: no `DenoisingRun`.
        ValueError: the run has no such row.
    """
    check_run(run)
    (row,) = chosen_indices("row", [row], len(run.tokens))
    inside = run.in_block[:, row].long()
    starts, lengths = inside.argmax(-1).tolist(), inside.sum(-1).tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def track_of(
    given: Source,
    detector: Detector | str | None,
    layer: int | None,
    head: int | None,
    row: int,
    queries: QueryClass = "all",
    follow: Follow = "position",
) -> Track:
    """The track of one layer, head and row.

    Raises:
        TypeError: an input without steps, a detector with `Sinks` or `Trajectories`, or tokens of something else
            than a recording.
        ValueError: an unknown layer, head or row, another level, or a class of queries for what has its own.
    """
    check_queries(given, queries)
    if isinstance(given, Sinks | Trajectories) and follow == "position":
        if detector is not None:
            raise TypeError(
                f"these {type(given).__name__} were found by {given.detector}; a detector goes with a Received"
            )
        return (
            _of_sinks(given, layer, head, row)
            if isinstance(given, Sinks)
            else _of_trajectories(given, layer, head, row)
        )
    shown = choose(as_received(given, queries, follow), layer, head, row)
    padding = 0 if shown.received.padding is None else int(shown.received.padding[0])
    rule = AboveMean(3.0) if detector is None else detector
    found = find_sinks(shown.received, rule, level=shown.level)
    track = _track(found, {}, shown.content.tolist(), shown.final).from_first_token(padding)
    # A step at which too few queries see each key has no score, but is no end.
    running = [step < shown.steps for step in range(len(track.largest))]
    places = history_places(meant(given).run)[:-1, row, padding:] if track.follow == "token" else None
    return replace(track, running=running, row=shown.row, layers=shown.layers, heads=shown.heads, places=places)


def trajectories_of(
    given: Source, detector: Detector | str | None, queries: QueryClass = "all", follow: Follow = "position"
) -> Trajectories:
    """The trajectories of the sinks, by the same rule as `track_of`.

    Raises:
        TypeError: an input without steps, or a detector with `Trajectories`.
    """
    check_queries(given, queries)
    if isinstance(given, Trajectories) and follow == "position":
        return given
    if isinstance(given, Sinks) and follow == "position":
        return trajectories(given, detector)
    return trajectories(as_received(given, queries, follow), AboveMean(3.0) if detector is None else detector)


def _of_sinks(sinks: Sinks, layer: int | None, head: int | None, row: int) -> Track:
    if "step" not in sinks.dims:
        raise TypeError(f"{sinks!r} has no steps to follow; give a Received or Sinks with a step axis")
    _check_level("Sinks", sinks.level, layer, head)
    sizes = dict(zip(sinks.dims, sinks.is_sink.shape, strict=True))
    axes: dict[str, tuple[int | None, Sequence[int]]] = {
        "batch": (row, range(sizes.get("batch", 1))),
        "layer": (layer, sinks.layers),
        "head": (head, sinks.heads or range(sizes.get("head", 1))),
    }
    place = {n: index_of(n, i, all_of) for n, (i, all_of) in axes.items() if n in sizes and i is not None}
    content = (~_at(sinks.scores, sinks.dims, place).isnan()).any(0)
    if sinks.masked is not None:
        content = content | _at(sinks.masked, _rows(sinks), place).any(0)
    final = None if sinks.tokens is None else _at(sinks.tokens, _rows(sinks), place)[-1]
    if sinks.final_tokens is not None:
        final = _at(sinks.final_tokens, _rows(sinks)[1:], place)
    tokens = None if final is None else final.tolist()
    padding = 0 if sinks.padding is None else int(sinks.padding[row])
    return _track(sinks, place, content.nonzero().flatten().tolist(), tokens).from_first_token(padding)


def _track(sinks: Sinks, place: dict[str, int], content: list[int], tokens: list[int] | None) -> Track:
    scores = _at(sinks.scores, sinks.dims, place)
    is_sink = _at(sinks.is_sink, sinks.dims, place)
    low = sinks.detector.low_is_sink
    largest = (-scores if low else scores).nan_to_num(nan=-torch.inf).argmax(-1)
    passes = is_sink.gather(-1, largest[:, None]).squeeze(-1)
    return Track(
        largest=largest.masked_fill(scores.isnan().all(-1), -1).tolist(),
        passes=passes.tolist(),
        masked=None if sinks.masked is None else _at(sinks.masked, _rows(sinks), place),
        content=content,
        tokens=tokens,
        tokenizer=sinks.tokenizer,
        rule=_rule(sinks),
        follow=sinks.follow,
        level=sinks.level,
        sinks=sinks.sinks,
        running=_until_last((~scores.isnan()).any(-1)),
        row=row_number(sinks, place.get("batch", 0)),
        uniform_noise=holds_random_tokens(sinks.tokens, sinks.masked),
        low=low,
        steps=sinks.steps,
        scored=not bool(scores.isnan().all()),
    )


def _of_trajectories(paths: Trajectories, layer: int | None, head: int | None, row: int) -> Track:
    """The track of one layer, head and row of `Trajectories`, which hold the largest key where it is a sink."""
    _check_level("Trajectories", paths.level, layer, head)
    layers = 0 if layer is None else index_of("layer", layer, paths.layers)
    heads = 0 if head is None else index_of("head", head, paths.head_numbers)
    row = index_of("row", row, range(paths.main.shape[1]))
    largest = paths.main[:, row, layers, heads].tolist()
    content = paths.scored[:, row].any(0)
    masked = None if paths.masked is None else paths.masked[:, row]
    if masked is not None:
        content = content | masked.any(0)
    final = paths.final_tokens
    if final is None and paths.tokens is not None:
        final = paths.tokens[-1]
    return Track(
        largest=largest,
        passes=[position >= 0 for position in largest],
        masked=masked,
        content=content.nonzero().flatten().tolist(),
        tokens=None if final is None else final[row].tolist(),
        tokenizer=paths.tokenizer,
        rule=_rule(paths),
        follow=paths.follow,
        level=paths.level,
        sinks=paths.sinks,
        running=_until_last(paths.defined[:, row, layers, heads]),
        row=row_number(paths, row),
        layers=paths.layers,
        uniform_noise=holds_random_tokens(paths.tokens, paths.masked),
        steps=paths.steps,
        scored=bool(paths.defined[:, row, layers, heads].any()),
    ).from_first_token(0 if paths.padding is None else int(paths.padding[row]))


def _rule(found: Sinks | Trajectories) -> str:
    rule = f"{found.detector}; scale: {found.scale}; queries: {found.queries}"
    return rule if found.follow == "position" else f"{rule}; {FOLLOWED_TOKENS}"


def _until_last(defined: Bool[Tensor, "step"]) -> list[bool]:
    """The steps up to the last one with a score: a row without scores after it has ended."""
    return defined.flip(0).cummax(0).values.flip(0).tolist()


def _check_level(what: str, level: Level, layer: int | None, head: int | None) -> None:
    if level_of(layer, head) != level:
        raise ValueError(
            f"these {what} are of level {level!r}, but layer={layer}, head={head} are of "
            f"{level_of(layer, head)!r}; call find_sinks with level="
        )


def _rows(sinks: Sinks) -> tuple[str, ...]:
    return tuple(name for name in sinks.dims if name not in ("layer", "head"))


def _at(tensor: Tensor, dims: Sequence[str], place: dict[str, int]) -> Tensor:
    """One place of a tensor with more axes than [step, key]."""
    return tensor[tuple(slice(None) if name in ("step", "key") else place.get(name, 0) for name in dims)]
