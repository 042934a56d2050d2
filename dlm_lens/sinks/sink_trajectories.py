"""`trajectories`: onsets, lifetimes and moves of sinks over the steps of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from dlm_lens.arguments import LEVEL, Rule, checked_arguments, instance, named_arguments, one_of
from dlm_lens.display import Preview, ShowsItself
from dlm_lens.recording import Recording
from dlm_lens.sampling.prompt_positions import from_prompt
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks.detection import COLUMNS, Sinks, find_sinks, scores_of
from dlm_lens.sinks.detectors.base import Detector, as_detector
from dlm_lens.sinks.followed_tokens import received_by_token
from dlm_lens.sinks.key_axes import Follow, KeyAxes, axis_sizes, with_all_axes
from dlm_lens.sinks.key_statistics import KeyStatistic
from dlm_lens.sinks.lifetimes import (
    KINDS,
    FollowedSinks,
    Ints,
    SinkLifetimes,
    active_steps,
    count_lifetimes,
    follow_sinks,
    kinds_of,
    link_lifetimes,
    main_path,
)
from dlm_lens.sinks.received import Level, Received, Scale, in_model

By = Literal["pattern", "head", "layer", "all"]
"""One line of a summary: a pattern of one sequence, a (layer, head) or a layer over all sequences, or all."""

GROUPS: dict[str, tuple[str, ...]] = {
    "pattern": ("batch", "layer", "head"),
    "head": ("layer", "head"),
    "layer": ("layer",),
    "all": (),
}


@dataclass(frozen=True, eq=False)
class Trajectories(ShowsItself, KeyAxes):
    """Sinks followed over steps, from `trajectories`; definitions there.

    A pattern is one (batch, layer, head), and its index counts over them in this order. Further arguments, by name,
    are those of `KeyAxes`; `dims` are without "key".

    Args:
        lives: every active interval of a position, ordered by pattern, first step and position.
        before: predecessor of each lifetime by a move; -1 for none.
        trajectory: trajectory of each lifetime; lifetimes linked by moves share one.
        main: position of the largest sink; -1 where there is none.
        main_score: its score; NaN where there is none.
        counts: how many sinks are active.
        defined: whether any key has a score.
        switched: whether the largest sink changed while the old and the new one are active before and after.
        static_position: the position that is active at most steps; -1 if there is never a sink.
        static_share: its share of the steps that have a sink.
        scored_by_layer: which keys have a score in each layer, fewer under a sliding window; its axis of layers has
            size 1 where all have the same.
        scale, level, queries, padding: as in `Sinks`.
        detector: the rule of the onset.
        hysteresis: factor of the rule's setting below which an active position ends.

    Raises:
        ValueError: the shapes contradict each other.
    """

    IDENTITY_ORDER = (
        "lives before trajectory main main_score counts defined switched static_position static_share "
        "scored_by_layer scale level detector hysteresis dims tokens masked final_tokens layers steps heads "
        "queries sinks tokenizer padding"
    )

    lives: SinkLifetimes
    before: Ints
    trajectory: Ints
    main: Int[Tensor, "step batch layer head"]
    main_score: Float[Tensor, "step batch layer head"]
    counts: Int[Tensor, "step batch layer head"]
    defined: Bool[Tensor, "step batch layer head"]
    switched: Bool[Tensor, "step batch layer head"]
    static_position: Int[Tensor, "batch layer head"]
    static_share: Float[Tensor, "batch layer head"]
    scored_by_layer: Bool[Tensor, "step batch #layer key"]
    scale: Scale
    level: Level
    detector: Detector
    hysteresis: float
    queries: str = "all"
    padding: Int[Tensor, "batch"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.lives) == len(self.before) == len(self.trajectory):
            raise ValueError(
                f"{len(self.before)} predecessors, {len(self.trajectory)} trajectories and {len(self.lives)} "
                "lifetimes"
            )

    def __repr__(self) -> str:
        counts = ", ".join(f"{int((self.kinds == kind).sum())} {kind}" for kind in KINDS)
        transient = int(self.lives.transient.sum())
        patterns = f"{self.kinds.size} patterns over {len(self.main)} steps: {counts}"
        return (
            f"Trajectories({len(self.lives)} lifetimes ({transient} transient), "
            f"{int((self.before >= 0).sum())} moves, {int(self.switched.sum())} switches; {patterns}; {self.rule})"
        )

    def _preview(self) -> Preview:
        return Preview(table=self.summary("layer"), note="per layer: .summary('layer'); every lifetime: .table()")

    @property
    def rule(self) -> str:
        """Rule, hysteresis, scale, level and counted queries as text, for captions."""
        has = self.hysteresis != 1 and self.detector.hysteresis_setting is not None  # `TopK` has no threshold
        off = f"off below {self.hysteresis:g} of its threshold" if has else "no hysteresis"
        queries = f"queries: {self.queries}{self.followed}"
        return f"{self.detector}, {off}; scale: {self.scale}; level: {self.level}; {queries}"

    @property
    def canvas(self) -> int:
        """How many of the keys are canvas positions; learned sink tokens come after them."""
        return self.scored_by_layer.shape[-1] - self.sinks

    @property
    def scored(self) -> Bool[Tensor, "step batch key"]:
        """Which keys have a score in at least one layer."""
        return self.scored_by_layer.any(2)

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis in `dims`."""
        return axis_sizes(self.main.shape, self.dims)

    @cached_property
    def kinds(self) -> NDArray[np.str_]:
        """Kind of each pattern: "none", "static", "moving" or "unsettled" (appear and vanish without a move)."""
        moves = np.bincount(self.lives.pattern, weights=self.before >= 0, minlength=self.static_share.numel())
        steps = (self.counts > 0).sum(0).numpy()
        shape = self.static_share.shape
        return kinds_of(steps, self.static_share.numpy(), np.asarray(moves, dtype=float).reshape(shape))

    def place(self, pattern: Ints) -> dict[str, Ints]:
        """Row (as in the whole run), layer and head (as in the model) of patterns, for the axes in `dims`.

        Raises:
            ValueError: a pattern that does not exist, or no whole number.
        """
        count = self.static_share.numel()
        Rule(f"whole numbers from 0 to {count - 1}", lambda given: _indices_below(count, given)).check(
            "place: pattern", pattern
        )
        at = dict(zip(GROUPS["pattern"], np.unravel_index(pattern, self.static_share.shape), strict=True))
        found = in_model(at, self.layers, self.heads, self.rows)
        return {name: index for name, index in found.items() if name in self.dims}

    @named_arguments(**dict.fromkeys(COLUMNS[1:], "a column of the table"))
    def table(self) -> pd.DataFrame:
        """One line per lifetime, ordered by pattern, first step and position.

        Columns: batch, layer, head (those in `dims`); `position`, counted from the prompt's first token, and
        `canvas_position` on the canvas (NA for a learned sink token; tokens that are followed have no
        `canvas_position`); `token` and `masked` at the onset and `token_last` at the last step (where known);
        `first_step`, `last_step`, `steps`; `peak` and `mean` score, `peak_step`; `main_steps`, at how many steps it
        was the largest; `transient` (seen to end after at most 2 steps); `born` and `died`, whether onset and end
        were observed (not at the ends of the run); `trajectory`, which lifetimes linked by moves share; `came_from`
        (on the canvas `canvas_came_from`) and `moved_by`, the position before the move and the distance (positive
        to the right), NA without a move.
        """
        lifetimes = self.lives
        columns: dict[str, Any] = dict(self.place(lifetimes.pattern))
        row = np.unravel_index(lifetimes.pattern, self.static_share.shape)[0]
        position = pd.Series(lifetimes.position, dtype="Int64")
        columns["position"] = position
        if self.tokens is not None:
            text, ids = TokenTexts(self.tokenizer), self.tokens.numpy()
            columns["token"] = [text(int(i)) for i in ids[lifetimes.first, row, lifetimes.position]]
            columns["token_last"] = [text(int(i)) for i in ids[lifetimes.last, row, lifetimes.position]]
        if self.masked is not None:
            columns["masked"] = self.masked.numpy()[lifetimes.first, row, lifetimes.position]
        number = np.asarray(self.step_numbers)
        columns |= {"first_step": number[lifetimes.first], "last_step": number[lifetimes.last]}
        columns |= {"steps": lifetimes.steps, "peak": lifetimes.peak, "mean": lifetimes.mean}
        columns |= {"peak_step": number[lifetimes.peak_step]}
        columns |= {"main_steps": lifetimes.main_steps, "transient": lifetimes.transient}
        columns |= {"born": lifetimes.born, "died": lifetimes.died, "trajectory": self.trajectory}
        came_from = pd.Series(lifetimes.position[self.before], dtype="Int64").mask(self.before < 0)
        columns |= {"came_from": came_from, "moved_by": position - came_from}
        return self._from_prompt({**columns, "row": row}, "position", "came_from")

    def _from_prompt(self, columns: dict[str, Any], *names: str) -> pd.DataFrame:
        """The table of these columns, `from_prompt`; of tokens no position is one of the canvas."""
        table = from_prompt(pd.DataFrame(columns), self.padding, self.canvas, names, rows="row")
        of_canvas = [f"canvas_{name}" for name in names] if self.follow == "token" else []
        return table.drop(columns=["row", *of_canvas], errors="ignore")

    def switches(self) -> pd.DataFrame:
        """One line per switch: a change of the largest sink between two positions that are active before and after.

        Columns: batch, layer, head (those in `dims`); `step`, the first at which the new one is the largest;
        `from_position` and `to_position`, counted from the prompt's first token (NA for a learned sink token), with
        `canvas_from_position` and `canvas_to_position` on the canvas; `moved_by`, the distance (positive to the
        right); `from_token` and `to_token` at that step, where known.
        """
        step, pattern = (index.numpy() for index in self.switched.flatten(1).nonzero(as_tuple=True))
        order = np.lexsort((step, pattern))
        step, pattern = step[order], pattern[order]
        row = np.unravel_index(pattern, self.static_share.shape)[0]
        main = self.main.flatten(1).numpy()
        columns: dict[str, Any] = {**self.place(pattern), "step": np.asarray(self.step_numbers)[step]}
        keys = {"from": main[step - 1, pattern], "to": main[step, pattern]}
        for name, key in keys.items():
            position = pd.Series(key, dtype="Int64")
            columns[f"{name}_position"] = position
        on_canvas = {
            name: column.mask(column >= self.canvas) for name, column in columns.items() if "position" in name
        }
        columns["moved_by"] = on_canvas["to_position"] - on_canvas["from_position"]
        if self.tokens is not None:
            text, ids = TokenTexts(self.tokenizer), self.tokens.numpy()
            for name, key in keys.items():
                columns[f"{name}_token"] = [text(int(i)) for i in ids[step, row, key]]
        return self._from_prompt({**columns, "row": row}, "from_position", "to_position")

    def summary(self, by: By = "head") -> pd.DataFrame:
        """Means over patterns, per pattern, per (layer, head), per layer, or over all.

        Columns: `patterns`, how many; `with_sink`, share of the steps that have a sink; `sinks`, how many are
        active; `lives`, `trajectories`, `moves`, `switches` per pattern; `life`, their mean length in steps,
        where those that the run's end cuts count as far as they were seen; `transient`, share of the lifetimes that
        were seen to end or to last longer; `move_rate` and `switch_rate`, per pair of neighbouring steps that both
        have scores; `moves_right`, share of the moves; `jump`, mean distance of a move; `static_share`, the share
        of the steps with a sink at which the most persistent position is active, which a pattern's line names as
        `static_position`, from the prompt's first token, and `canvas_static_position`; of the path of the largest
        sink `moved_over_run`, `displacement`, `drift`, `drift_right` (share of the patterns with a drift that go
        right), `variance` (studied by 2602.17664), `changes`, `change`, see `lifetimes.main_path`; and the share
        of the patterns of each kind. Means leave out patterns for which a quantity is not defined.

        In a part of a run that leaves steps out, `drift` is per step of the run; `life`, `move_rate` and
        `switch_rate` count the steps of the part.

        Raises:
            ValueError: an unknown grouping.
        """
        one_of(*GROUPS).check("summary: by", by)
        table = self.measures.assign(**{kind: (self.measures["kind"] == kind).astype(float) for kind in KINDS})
        names = [name for name in GROUPS[by] if name in self.dims]
        if by == "pattern":
            return table.drop(columns=["patterns", *KINDS])
        table = table.drop(columns=["kind", "static_position", "canvas_static_position"], errors="ignore")
        groups = table.groupby(names, sort=True) if names else table.groupby(lambda _: "all")
        result = (
            groups.mean(numeric_only=True)
            .assign(patterns=groups.size())
            .drop(columns=[name for name in GROUPS["pattern"] if name not in names], errors="ignore")
        )
        return result.reset_index() if names else result.reset_index(drop=True)

    @cached_property
    def measures(self) -> pd.DataFrame:
        """One line per pattern, which `summary` averages."""
        index = np.arange(self.static_share.numel())
        defined = self.defined.sum(0).flatten().numpy()
        pairs = (self.defined[1:] & self.defined[:-1]).sum(0).flatten().numpy()
        pairs = np.where(pairs > 0, pairs, np.nan)
        sink_steps = (self.counts > 0).sum(0).flatten().numpy()
        lifetimes = count_lifetimes(self.lives, self.before, self.trajectory, len(index))
        switches = self.switched.sum(0).flatten().numpy()
        path = main_path(
            self.main.flatten(1).numpy(), self.canvas, self.defined.flatten(1).numpy(), self.step_numbers
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            part, mean = sink_steps / defined, self.counts.sum(0).flatten().numpy() / defined
        drift = np.where(path["drift"] == 0, np.nan, path["drift"])
        columns: dict[str, Any] = self.place(index) | {"patterns": np.ones(len(index), dtype=int)}
        columns |= {"kind": self.kinds.flatten(), "with_sink": part, "sinks": mean} | lifetimes
        columns |= {"switches": switches, "move_rate": lifetimes["moves"] / pairs, "switch_rate": switches / pairs}
        columns |= {
            "static_position": self.static_position.flatten().numpy(),
            "row": np.unravel_index(index, self.static_share.shape)[0],
            "static_share": self.static_share.flatten().numpy(),
        }
        columns |= path | {"drift_right": np.where(np.isnan(drift), np.nan, drift > 0)}
        return self._from_prompt(columns, "static_position")


def _indices_below(count: int, given: Any) -> bool:
    index = np.asarray(given)
    return index.dtype.kind in "iu" and bool(((index >= 0) & (index < count)).all())


FOLLOWED = instance(Trajectories, "the Trajectories of dlm_lens.trajectories")

HYSTERESIS = 0.75
"""An active sink ends below the threshold of the rule with its setting times this factor."""

ENTRIES_AT_ONCE = 2**20
"""Scores in work at a time: 4 MiB in float32, so that the allocator reuses the memory of the piece before."""


@checked_arguments(level=LEVEL)
def trajectories(
    sinks: Received | Recording | Sinks,
    detector: Detector | str | None = None,
    *,
    level: Level = "head",
    hysteresis: float = HYSTERESIS,
    follow: Follow = "position",
) -> Trajectories:
    """Follow sinks over steps: when each appears, moves and vanishes, in every pattern (2510.15731, section 4.2).

    A position becomes active at the step at which the detector finds it (its onset), and stays active until its
    score falls below the detector's threshold with eps times `hysteresis` (k for `AboveStd`, x for
    `AttentionShare`). An active interval is a **lifetime**. A sink **moved** if the end of one lifetime is within
    one step of the onset of another; lifetimes linked by moves are one **trajectory**. A pattern is **static** if
    one position is active in at least 90% of the steps that have a sink, **moving** if it is not static and a sink
    moved. A lifetime that ends after at most 2 steps is **transient**. A change of the largest sink between two
    positions that both stay active is a **switch**, not a move.

    A step without any score (a class of queries that is empty) belongs to no lifetime, and the end of a lifetime
    before it counts as not observed. The input is read piece by piece, also if it is a memory map.

    Args:
        sinks: a `Received` with a step axis, or a `Recording` (of all queries; `received_of` for others), and a
            detector, which takes less memory; or `Sinks`. Of a recording, `AboveMedian` reads the recorded
            activations of hidden states, with hysteresis=1.
        detector: the rule for a `Received` or a `Recording`, or its text, such as "above-mean:3"; None for `Sinks`.
        level: for a `Received`: follow the sinks of every "head", of the head-mean pattern of a "layer", or of the
            "model" mean. `Sinks` keep their level.
        hysteresis: factor of the rule's setting below which an active sink ends; 1 for none.
        follow: "position", of the canvas. "token", of a `Recording` whose sampler inserts and deletes masks
            (DreamOn, LLaDA2.2): a position is then that of a token or mask among all that the row's canvases ever
            held, in their order, so that a sink whose token the sampler moves has not moved. Where nothing moves,
            the two are the same, and the result says "position".

    Raises:
        TypeError: another input, no detector, a second one, or one without hysteresis; follow="token" of something
            else than a `Recording`, or of hidden states.
        ValueError: there is no step axis, hysteresis is not in (0, 1], or the level does not exist.
    """
    if not 0 < hysteresis <= 1:
        raise ValueError(f"hysteresis is {hysteresis}; it is a factor of the threshold, above 0 and at most 1")
    given = _input_of(sinks, detector, level, follow)
    if "step" not in given.dims:
        raise ValueError(f"the sinks have the axes {given.dims}; trajectories need a step axis")
    shape = given.scores.shape
    found = [
        (index, follow_sinks(scores, active_steps(scores, given.detector, hysteresis, entered)))
        for index, scores, entered in given.pieces()
    ]
    lifetimes = _joined([(index, piece.lifetimes) for index, piece in found])
    gathered: dict[str, Any] = {name: _gathered(found, name, shape) for name in _PER_STEP + _PER_PATTERN}
    before, trajectory = link_lifetimes(lifetimes, lifetimes.position < shape[-1] - given.context["sinks"])
    return Trajectories(
        lives=lifetimes,
        before=before,
        trajectory=trajectory,
        **gathered,
        scored_by_layer=given.scored_by_layer(),
        scale=given.scale,
        detector=given.detector,
        hysteresis=hysteresis,
        **given.context,
    )


_PER_STEP = ("main", "main_score", "counts", "defined", "switched")
_PER_PATTERN = ("static_position", "static_share")


@dataclass(frozen=True)
class _Input:
    """The scores on all five axes, and the fields that the result takes over."""

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

    def scored_by_layer(self) -> Bool[Tensor, "step batch #layer key"]:
        """Which keys have a score in at least one head of a layer; one layer where all are equal."""
        steps, batch, layers, heads, keys = self.scores.shape
        scored = torch.zeros(steps, batch, layers, keys, dtype=torch.bool)
        for layer in range(layers):
            for head in range(heads):
                scored[:, :, layer] |= ~self.scores[:, :, layer, head].isnan()
        return scored[:, :, :1] if layers and bool((scored == scored[:, :, :1]).all()) else scored


def _input_of(sinks: Any, detector: Detector | str | None, level: Level, follow: Follow) -> _Input:
    if follow == "token":
        if (detector := as_detector(detector)).reads_hidden_states:
            raise TypeError(f'follow="token" follows received attention, and {detector} reads hidden states')
        sinks = received_by_token(sinks)
    if isinstance(sinks, Recording):
        detector = as_detector(detector)
        sinks = scores_of(sinks, detector, level)
        if isinstance(sinks, KeyStatistic):
            sinks, detector = find_sinks(sinks, detector, level=level), None
    if isinstance(sinks, Received):
        detector = as_detector(detector)
        received = sinks.at_level(level)
        scale = received.part(slice(0, 0)).read(detector.quantity)[1]
        return _Input(received.values, received, None, scale, detector, received.dims, _context(received))
    if not isinstance(sinks, Sinks):
        raise TypeError(f"trajectories of a {type(sinks).__name__}; give a Received and a detector, or Sinks")
    if sinks.detector.low_is_sink:
        raise TypeError(f"{sinks.detector} has sinks with low scores; trajectories follow high ones")
    if detector is not None or level not in ("head", sinks.level):
        raise TypeError(
            f"these Sinks were found by {sinks.detector} at level {sinks.level}; leave the detector and level= out"
        )
    scores, entered = (with_all_axes(tensor, sinks.dims) for tensor in (sinks.scores, sinks.is_sink))
    return _Input(scores, None, entered, sinks.scale, sinks.detector, sinks.dims, _context(sinks))


def _context(given: Received | Sinks) -> dict[str, Any]:
    """The fields that `Trajectories` take over; patterns have no axis of keys."""
    dims = tuple(name for name in given.dims if name != "key")
    own = {"level": given.level, "queries": given.queries, "padding": given.padding}
    return given.shared_fields | own | {"dims": dims}


def _joined(pieces: list[tuple[Tensor, SinkLifetimes]]) -> SinkLifetimes:
    """The lifetimes of all pieces, ordered by pattern, first step and position."""
    owners = np.concatenate([index.numpy()[lifetimes.pattern] for index, lifetimes in pieces])
    values = {
        name.name: np.concatenate([getattr(lifetimes, name.name) for _, lifetimes in pieces])
        for name in fields(SinkLifetimes)
    }
    values["pattern"] = owners
    order = np.lexsort((values["position"], values["first"], owners))
    return SinkLifetimes(**{name: value[order] for name, value in values.items()})


def _gathered(found: list[tuple[Tensor, FollowedSinks]], name: str, shape: tuple[int, ...]) -> Tensor:
    """One quantity of all pieces, on the axes (step,) batch, layer, head."""
    index = torch.cat([index for index, _ in found])
    values = torch.cat([getattr(piece, name) for _, piece in found], -1)
    ordered = torch.empty_like(values)
    ordered[..., index] = values
    return ordered.unflatten(-1, shape[1:4])
