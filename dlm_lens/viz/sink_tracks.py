"""The largest key of one pattern at every step, from received attention, `Sinks` or `Trajectories`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.arguments import chosen_indices, meant
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling.denoising_run import holds_random_tokens
from dlm_lens.sampling.emerging_text import changed_on_canvas
from dlm_lens.sampling.moved_tokens import at_places, history_places
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sinks import AboveMean, Detector, Level, Received, Sinks, Trajectories, find_sinks, trajectories
from dlm_lens.sinks.key_axes import Follow, with_all_axes
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
            ValueError: of another number of steps, or keys are tokens whose places are not known.
        """
        canvas = self.content[: len(self.content) - self.sinks]
        low, high = (min(canvas), max(canvas) + 1) if canvas else (0, 0)
        places = None if self.follow == "position" else self._known_places("blocks")

        def inside(step: int, start: int, stop: int) -> Sequence[int]:
            if places is None:
                return range(max(start - self.padding, low), min(stop - self.padding, high))
            return ((places[step] >= start) & (places[step] < stop)).nonzero().flatten().tolist()

        if len(spans) != len(self.running):
            raise ValueError(
                f"{len(spans)} blocks for {len(self.running)} steps; give one (start, stop) per step, run.spans"
            )
        keys = [inside(step, *span) if self.running[step] else () for step, span in enumerate(spans)]
        return [(each[0], each[-1] + 1) if each else None for each in keys]

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
                "recording"
            )
        return self.places


def revised_of(given: Source, row: int) -> Bool[Tensor, "step position"] | None:
    """Which decided tokens of a row each step of a recording rewrote or opened again; None for other inputs."""
    return changed_on_canvas(given.run, row)[1] if isinstance(given, Recording) else None


def row_blocks(run: RunLike, row: int) -> list[tuple[int, int]]:
    """The block of a row at each step of its run, as (start, stop) canvas positions; empty where it has ended.

    Raises:
        TypeError: no `DenoisingRun`.
        ValueError: the run has no such row.
    """
    run = as_run(run)
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
        place = _place(given, layer, head, row)
        return _of_sinks(given, *place) if isinstance(given, Sinks) else _of_trajectories(given, *place)
    shown = choose(as_received(given, queries, follow), layer, head, row)
    padding = 0 if shown.received.padding is None else int(shown.received.padding[0])
    rule = AboveMean(3.0) if detector is None else detector
    found = find_sinks(shown.received, rule, level=shown.level)
    track = _of_sinks(found, 0, 0, 0)
    # A step at which too few queries see each key has no score, but is no end.
    running = [step < shown.steps for step in range(len(track.largest))]
    places = history_places(meant(given).run)[:-1, row, padding:] if track.follow == "token" else None
    content = [key - padding for key in shown.content.tolist()]
    track = replace(track, content=content, running=running, places=places)
    return replace(track, row=shown.row, layers=shown.layers, heads=shown.heads)


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


def _of_sinks(sinks: Sinks, row: int, layer: int, head: int) -> Track:
    """The track of one place on the axes that sinks have; 0 on the others."""
    scores, is_sink = (
        with_all_axes(of_keys, sinks.dims)[:, row, layer, head] for of_keys in (sinks.scores, sinks.is_sink)
    )
    low = sinks.detector.low_is_sink
    largest = (-scores if low else scores).nan_to_num(nan=-torch.inf).argmax(-1)
    known = ~scores.isnan()
    return _from_first_token(
        sinks,
        row,
        known,
        largest=largest.masked_fill(~known.any(-1), -1).tolist(),
        passes=is_sink.gather(-1, largest[:, None]).squeeze(-1).tolist(),
        running=_until_last(known.any(-1)),
        low=low,
        scored=bool(known.any()),
    )


def _place(found: Sinks | Trajectories, layer: int | None, head: int | None, row: int) -> tuple[int, int, int]:
    """Row, layer and head on their axes; 0 on an axis that is not there.

    Raises:
        TypeError: there are no steps.
        ValueError: another level, or an index that does not exist.
    """
    if "step" not in found.dims:
        raise TypeError(f"{found!r} has no steps to follow; give a Received or Sinks with a step axis")
    if (wanted := level_of(layer, head)) != found.level:
        raise ValueError(
            f"these {type(found).__name__} are of level {found.level!r}, but layer={layer}, head={head} are of "
            f"{wanted!r}; call find_sinks with level="
        )
    row = index_of("row", row, range(found.sizes.get("batch", 1)))
    axes = (("layer", layer, found.layers), ("head", head, found.head_numbers))
    places = [
        index_of(name, index, numbers) if index is not None and name in found.dims else 0
        for name, index, numbers in axes
    ]
    return row, places[0], places[1]


def _from_first_token(found: Sinks | Trajectories, row: int, known: Bool[Tensor, "step key"], **own: Any) -> Track:
    """The track of a row with what its result knows of the keys, from the row's first token on."""
    shared = found.shared_fields
    masked = None if shared["masked"] is None else shared["masked"][:, row]
    content = known.any(0) if masked is None else known.any(0) | masked.any(0)
    final = shared["final_tokens"]
    if final is None and found.tokens is not None:
        final = shared["tokens"][-1]
    rule = f"{found.detector}; scale: {found.scale}; queries: {found.queries}{found.followed}"
    return Track(
        **own,
        masked=masked,
        content=content.nonzero().flatten().tolist(),
        tokens=None if final is None else final[row].tolist(),
        tokenizer=found.tokenizer,
        rule=rule,
        follow=found.follow,
        level=found.level,
        sinks=found.sinks,
        row=row_number(found, row),
        uniform_noise=holds_random_tokens(found.tokens, found.masked),
        steps=found.steps,
    ).from_first_token(0 if found.padding is None else int(found.padding[row]))


def _of_trajectories(paths: Trajectories, row: int, layers: int, heads: int) -> Track:
    """The track of one place of `Trajectories`, which hold the largest key where it is a sink."""
    largest = paths.main[:, row, layers, heads].tolist()
    defined = paths.defined[:, row, layers, heads]
    return _from_first_token(
        paths,
        row,
        paths.scored[:, row],
        largest=largest,
        passes=[position >= 0 for position in largest],
        running=_until_last(defined),
        layers=paths.layers,
        scored=bool(defined.any()),
    )


def _until_last(defined: Bool[Tensor, "step"]) -> list[bool]:
    """The steps up to the last one with a score: a row without scores after it has ended."""
    return defined.flip(0).cummax(0).values.flip(0).tolist()
