"""`find_sinks`: apply a detector to received attention, a pattern or a recording; its result `Sinks`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import (
    LEVEL,
    RULES,
    Rule,
    checked_arguments,
    instance,
    meant,
    named_arguments,
    one_of,
    whole,
)
from dlm_lens.display import ROWS, Preview, ShowsItself
from dlm_lens.printable import shown
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling.prompt_positions import from_prompt
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks.detectors.base import Detector, MedianDetector, as_detector, of_every_key
from dlm_lens.sinks.from_patterns import received_from_pattern
from dlm_lens.sinks.from_recording import key_statistic_of, received_of
from dlm_lens.sinks.key_axes import AXES, KeyAxes, each_key_tensor, key_shapes, with_all_axes, without_absent_axes
from dlm_lens.sinks.key_statistics import KeyStatistic
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE, Level, Received, Scale

COLUMNS = ("step", "batch", "layer", "head", "position", "token")
"""Columns of a table of sinks that say where a sink is."""


@dataclass(frozen=True, eq=False)
class Sinks(ShowsItself, KeyAxes):
    """The sinks that a detector found.

    Further arguments, by name, are those of `KeyAxes`; its tensors [..., key] have those axes that are in `dims`.

    Args:
        is_sink: True for the columns that are sinks; its axes are `dims`.
        scores: the score of every key, on `scale`; NaN where undefined.
        threshold: the threshold of every key; NaN where the rule has none.
        scale: unit of scores and threshold.
        level: whose pattern a score describes: "head", "layer" (mean over heads) or "model" (mean over all).
        detector: the rule.
        queries: the class of counted queries, as text.
        padding: how many keys of each row are padding on its left; None for none.

    Raises:
        ValueError: the shapes contradict each other.
    """

    IDENTITY_ORDER = (
        "is_sink scores threshold scale level detector dims tokens masked layers steps heads queries sinks "
        "tokenizer padding final_tokens"
    )

    is_sink: Bool[Tensor, "*axes key"]
    scores: Float[Tensor, "*axes key"]
    threshold: Float[Tensor, "*axes key"]
    scale: Scale
    level: Level
    detector: Detector
    queries: str = "all"
    padding: Int[Tensor, "batch"] | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.is_sink.shape)
        if len(shape) != len(self.dims) or tuple(d for d in AXES if d in self.dims) != self.dims:
            raise ValueError(f"Sinks.is_sink has shape {list(shape)}, which does not fit the axes {self.dims}")
        wanted = {"scores": shape, "threshold": shape} | key_shapes(self.sizes)
        for name, expected in wanted.items():
            given = getattr(self, name)
            if given is not None and tuple(given.shape) != expected:
                raise ValueError(f"Sinks.{name} has shape {list(given.shape)}; is_sink needs {list(expected)}")
        for axis, numbers in (
            ("layer", self.layers), ("step", self.steps), ("head", self.heads), ("batch", self.rows)
        ):  # fmt: skip
            known = numbers or (axis == "layer" and axis in self.dims)
            if known and len(numbers) != self.sizes.get(axis, 1):
                raise ValueError(f"{len(numbers)} {axis} numbers for is_sink of shape {list(shape)} {self.dims}")

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis in `dims`."""
        return dict(zip(self.dims, self.is_sink.shape, strict=True))

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """The index of each head in the model; none where heads are merged."""
        return super().head_numbers if "head" in self.dims else ()

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields of `KeyAxes`, with all axes, for another result of the same keys."""
        return each_key_tensor(super().shared_fields, with_all_axes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        defined = int((~self.scores.isnan()).sum())
        return f"Sinks({int(self.is_sink.sum())} of {defined} columns by {self.rule}; {sizes})"

    def _preview(self) -> Preview:
        found = self.is_sink.any(0) if "step" in self.dims else self.is_sink
        return Preview(table=self.table(top=ROWS), total=int(found.sum()), note="all: .table()")

    @property
    def rule(self) -> str:
        """Rule, scale, level and counted queries as text, for captions."""
        return f"{self.detector}; scale: {self.scale}; level: {self.level}; queries: {self.queries}"

    def main(self) -> Int[Tensor, "*axes"]:
        """Key of the largest sink of every pattern; -1 where there is none. Of equals, the earlier one.

        For rules whose sinks have low scores (`LowKeyNorm`), the key with the lowest score. Keys are canvas
        positions, then learned sink tokens.
        """
        scores = -self.scores if self.detector.low_is_sink else self.scores
        best = scores.masked_fill(~self.is_sink, -torch.inf).argmax(-1)
        return best.masked_fill(~self.is_sink.any(-1), -1)

    @named_arguments(**dict.fromkeys(COLUMNS, "a column of the table"))
    def table(self, top: int | None = None, sort: Literal["score", "place"] = "score") -> pd.DataFrame:
        """One line per sink and step.

        Columns: step, batch, layer, head, position, canvas_position, token, masked, score, threshold, scale, level.
        Axes that are not in `dims` have no column; token and masked have none if they are unknown. `token` is text
        with a space as ␣ (`token_text`) if there is a tokenizer, else the id. `step` and `batch` are the numbers in
        the whole run, `layer` and `head` are indices in the model, `position` counts from the prompt's first token,
        without padding; if a row has padding, `canvas_position` is the index on the canvas, which indexes tensors.
        Both are missing (NA) for a learned sink token, whose token is "sink(0)".

        Args:
            top: list only this many sinks, each (batch, layer, head, position) once: at the step at which it is
                strongest (the first of equals), with `steps`, the number of steps at which it is a sink.
            sort: "score", strongest first (of `LowKeyNorm` the lowest, else the highest), or "place", by step,
                batch, layer, head, position.

        Raises:
            ValueError: an unknown order, or a number of lines that is negative or not whole.
        """
        if top is not None:
            whole(least=0).check("table: top", top)
        one_of("score", "place").check("table: sort", sort)
        where = self.is_sink.nonzero(as_tuple=True)
        columns: dict[str, Any] = {
            "position" if name == "key" else name: index.tolist()
            for name, index in zip(self.dims, where, strict=True)
        }
        for name, numbers in (("step", self.steps), ("layer", self.layers), ("head", self.heads)):
            if name in columns and numbers:
                columns[name] = [numbers[i] for i in columns[name]]
        rows = tuple(i for name, i in zip(self.dims, where, strict=True) if name not in ("layer", "head"))
        if self.tokens is not None:
            text = TokenTexts(self.tokenizer)
            columns["token"] = [text(i) for i in self.tokens[rows].tolist()]
        if self.masked is not None:
            columns["masked"] = self.masked[rows].tolist()
        columns["score"] = self.scores[where].tolist()
        columns["threshold"] = self.threshold[where].tolist()
        table = pd.DataFrame(columns).assign(scale=self.scale, level=self.level)
        by_score = table.sort_values("score", ascending=self.detector.low_is_sink, kind="stable")
        if top is not None:
            by_score = self._once(by_score).head(top)
        table = by_score if sort == "score" else by_score.sort_index()
        canvas = self.is_sink.shape[-1] - self.sinks
        return from_prompt(table.reset_index(drop=True), self.padding, canvas, numbers=self.rows)

    def _once(self, ordered: pd.DataFrame) -> pd.DataFrame:
        """The first line of every sink, and at how many steps it is one."""
        place = [name for name in ("batch", "layer", "head", "position") if name in ordered]
        if "step" not in ordered:
            return ordered
        steps = ordered.groupby(place)["step"].transform("size")
        return ordered.assign(steps=steps).drop_duplicates(place)


class PatternSettings(TypedDict, total=False):
    """Arguments of `received_from_pattern`, which `find_sinks` takes for patterns."""

    dims: Sequence[str] | None
    visible: Bool[Tensor, "*leading query key"] | None
    attention_mask: Int[Tensor, "*rows key"] | Bool[Tensor, "*rows key"] | None
    causal: bool
    tokens: Int[Tensor, "*rows key"] | None
    masked: Bool[Tensor, "*rows key"] | None
    tokenizer: Any
    layers: Sequence[int] | None
    min_viewers: int


FOUND = instance(Sinks, "the Sinks of dlm_lens.find_sinks")


@checked_arguments(
    attention=None,
    level=LEVEL,
    dims=Rule("names of axes, or None", lambda dims: all(isinstance(name, str) for name in dims)),
    queries=Rule("a class of queries, a tensor, or None", lambda queries: isinstance(queries, Tensor | str)),
    **dict.fromkeys(("visible", "attention_mask", "tokens", "masked"), instance(Tensor, "a tensor, or None")),
)
def find_sinks(
    attention: Received | Recording | KeyStatistic | Float[Tensor, "*leading query key"],
    detector: Detector | str,
    *,
    level: Level = "head",
    relative: bool | None = None,
    queries: QueryClass | Bool[Tensor, "*rows query"] | None = None,
    **pattern_settings: Unpack[PatternSettings],
) -> Sinks:
    """Apply a detector to received attention: sinks are the keys whose scores pass the rule (2510.15731, Eq. 3).

    Args:
        attention: a `Received`, a `Recording` (of the class `queries`, "all" by default), or a pattern
            [head, query, key], [batch, head, query, key], [step, batch, head, query, key] or
            [step, batch, layer, head, query, key] (other axes: `dims=`); or a `KeyStatistic` of hidden states, for
            `AboveMedian` and `LowKeyNorm`.
        detector: `AboveMean(eps)`, `AboveStd(k)`, `AttentionShare(x)`, `MeanReceived(x)`, `SoftSigmoid()`,
            `TopK(k)`, your own `Detector`, or a text of the registry, such as "above-std:3".
        level: apply the rule to every "head", to the head-mean pattern of a "layer", or to the mean pattern of the
            "model": the mean of r_j over heads (and layers), divided by e_j. A `KeyStatistic` keeps its level.
        relative: True for scores relative to uniform, False for raw column sums; None for True with a pattern,
            and for the scale of a `Received`. `AttentionShare` always reads shares, `MeanReceived` means.
        queries: of a recording one of its classes, such as "masked" ("all" by default); of a pattern True for the
            queries that count, as for `received_from_pattern`.
        **pattern_settings: for patterns, other arguments of `received_from_pattern`: visible, attention_mask,
            causal, tokens, masked, tokenizer, layers, min_viewers, dims.

    Returns:
        Sinks whose axes are those of the input without query and without the merged ones.

    Raises:
        TypeError: no detector, no attention, or settings of a pattern with a `Received`.
        ValueError: axes that do not fit, rows that do not sum to 1, a level that the input does not have, a text
            that names no detector, or a class of queries that was not recorded or is not one of a recording.
    """
    detector = as_detector(detector)
    if "min_viewers" in pattern_settings:
        RULES["min_viewers"].check("min_viewers", pattern_settings["min_viewers"])
    if isinstance(attention, Recording):
        if isinstance(queries, Tensor):
            raise TypeError("queries is a tensor: for patterns only; of a Recording give a class, such as 'masked'")
        attention, queries = scores_of(attention, detector, level, queries or "all"), None
    if isinstance(queries, str):
        raise ValueError(f"queries is {shown(queries)}: a class is of a Recording; of a pattern give a tensor")
    of_pattern = [*pattern_settings, *(["queries"] if queries is not None else [])]
    if isinstance(attention, KeyStatistic):
        if of_pattern or relative is not None or level not in ("head", attention.level):
            raise TypeError(f"{attention!r} has the level {attention.level} and takes no settings of patterns")
        return _detected(attention, detector)
    if isinstance(attention, Received):
        if of_pattern:
            raise TypeError(f"{', '.join(of_pattern)}: for patterns only; this Received is already summed")
        received = attention
        if relative is not None:
            received = received.on_scale(RELATIVE if relative else COLUMN_SUM)
    else:
        received = received_from_pattern(
            attention, relative=relative is not False, queries=queries, **pattern_settings
        )
    return _detected(received.at_level(level), detector)


SinksLike = Sinks | Detector | str
"""Sinks, or the rule by which to find them in a recording, as for `find_sinks`."""


def as_sinks(given: SinksLike, source: Any, name: str = "sinks") -> Sinks:
    """The sinks themselves; of a detector, or a text that names one, those that it finds in each head of `source`.

    Raises:
        ValueError: a detector where `source` is no recording, or something else.
    """
    source = meant(source)
    if isinstance(given, Detector | str) and isinstance(source, Recording):
        return find_sinks(source, given)
    if not isinstance(given, Sinks):
        raise ValueError(
            f"{name} is {shown(given)}; it must be the Sinks of dlm_lens.find_sinks or, with a recording in place "
            "of the run, a detector"
        )
    return given


def scores_of(
    recording: Recording, detector: Detector, level: Level, queries: QueryClass = "all"
) -> Received | KeyStatistic:
    """The scores of a recording that a rule reads.

    Raises:
        ValueError: the recording lacks them; a class of queries or another level for a rule that reads hidden
            states.
    """
    if not detector.reads_hidden_states:
        return received_of(recording, queries)
    if queries != "all":
        raise ValueError(
            f"queries={queries}: {detector} reads hidden states, for which no queries count; leave queries= out"
        )
    found = key_statistic_of(recording, detector.quantity)  # type: ignore[arg-type]
    if level not in ("head", found.level):
        raise ValueError(f"level={level}: {detector} finds the sinks of each {found.level}; leave level= out")
    return found


def _detected(given: Received | KeyStatistic, detector: Detector) -> Sinks:
    scores, scale = given.read(detector.quantity)
    if isinstance(detector, MedianDetector) and isinstance(given, KeyStatistic):
        is_sink, threshold = detector.detect(scores, given.median), detector.thresholds(scores, given.median)
    else:
        is_sink, threshold = detector.detect(scores), detector.thresholds(scores)
    is_sink = of_every_key(detector, "detect", is_sink, scores)
    threshold = of_every_key(detector, "thresholds", threshold, scores)
    return Sinks(
        is_sink=without_absent_axes(is_sink, given.dims),
        scores=without_absent_axes(scores, given.dims),
        threshold=without_absent_axes(threshold, given.dims),
        scale=scale,
        level=given.level,
        detector=detector,
        queries=given.queries if isinstance(given, Received) else "none (hidden states)",
        padding=given.padding,
        **each_key_tensor(given.shared_fields, without_absent_axes),
    )


def check_all_heads(found: int, heads: int, who: str) -> None:
    """Raise where sinks or scores of single heads are not of all heads: which ones they are, they do not say.

    Args:
        found: heads that the sinks have, fewer in a part such as `recording.select(head=)`.
        heads: of a layer of the model.
        who: reads the sinks.

    Raises:
        ValueError: with both numbers.
    """
    if found != heads:
        raise ValueError(
            f"{who}: the sinks are of {found} heads and a layer has {heads}; give those of all heads, and choose "
            "heads afterwards (for a hook: at_heads)"
        )
