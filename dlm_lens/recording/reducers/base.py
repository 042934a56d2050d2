"""`Reducer` and `PatternReducer`, the base classes of all statistics, and `LayerStep`, what they compute from."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import QUERY_STATS, AttentionInputs, QueryStat, RunStep
from dlm_lens.printable import shown
from dlm_lens.recording.canvas_facts import CanvasFacts
from dlm_lens.recording.query_classes import QUERY_CLASSES, QueryClass, checked_class, stored_name
from dlm_lens.recording.reducer_registry import named_reducers

ARRAY_AXES = ("step", "batch", "layer", "head", "kv_head", "query", "key")
"""Axes of a recorded array, in this order; axes of a reducer's own come after them."""

KEY_DIMS = ("step", "batch", "layer", "head", "key")
"""The axes of a number per head and key."""

STREAM_PARTS: Mapping[str, tuple[str, ...]] = {
    "resid_in": ("resid",),
    "attn_out": ("resid", "attn_out"),
    "resid_out": ("resid_out",),
    "resid": ("resid", "attn_out", "resid_out"),
}
"""What a reducer may read of the residual stream -> the fields of its `LayerStep`."""


@dataclass(frozen=True, eq=False)
class LayerStep:
    """One layer at one step: the tensors that a reducer computes its statistic from.

    Rows are the prompts; of a guided forward pass the conditional half. Queries are the canvas positions; keys are
    the canvas positions and, after them, the model's learned sink tokens, wherever the network has those. With an
    approximate cache only the positions `facts.attending` are computed: the others have queries of 0, outputs and
    residual streams of NaN, and the keys and values of an earlier step.

    Args:
        index: of the layer.
        inputs: rotated queries and keys, values, and which keys each query sees; `inputs.z` is the attention output
            of every head, before W_O.
        run: the step of the run: tokens, masked, valid, prompt, block, ...
        facts: the classes of queries, and what keys receive under uniform attention.
        sums: r_j = sum_i A_ij for each class of queries that a reducer reads.
        per_query: for each of "entropy", "self", "past" and "future" that a reducer reads, a number per query:
            -sum_j A_ij ln A_ij, A_ii, and the sums of A_ij over the canvas keys before and after i; 0 or any number
            where a query is not computed.
        regions: sets of keys by name: prompt, masked, unmasked, block, sink (the learned sink tokens).
        weight: returns W_O of every head, [head, d_head, d_model].
        resid: the residual stream that enters the layer, if a reducer reads "resid_in", "attn_out" or "resid".
        attn_out: the output of attention that is added to it, if a reducer reads "attn_out" or "resid".
        resid_out: the residual stream that leaves the layer, if a reducer reads "resid_out" or "resid".
        memory: a dict that reducers may keep tensors in, from step to step of one run, for this layer. It is not
            stored: with anything in it but values that are the same at every step, whose keys are tuples that begin
            with "constant", an interrupted run starts again, and `rerun` takes the steps from the first one on.
        shared: results of `once`.
    """

    index: int
    inputs: AttentionInputs
    run: RunStep
    facts: CanvasFacts
    sums: Mapping[QueryClass, Float[Tensor, "batch head key"]] = field(default_factory=dict)
    per_query: Mapping[QueryStat, Float[Tensor, "batch head query"]] = field(default_factory=dict)
    regions: Mapping[str, Bool[Tensor, "batch key"]] = field(default_factory=dict)
    weight: Callable[[], Float[Tensor, "head d_head d_model"]] | None = None
    resid: Float[Tensor, "batch key d_model"] | None = None
    attn_out: Float[Tensor, "batch key d_model"] | None = None
    resid_out: Float[Tensor, "batch key d_model"] | None = None
    memory: MutableMapping[Any, Any] = field(default_factory=dict)
    shared: MutableMapping[Any, Any] = field(default_factory=dict)

    def once(self, name: Hashable, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which is called once for all reducers of the layer that give this name."""
        if name not in self.shared:
            self.shared[name] = compute()
        return self.shared[name]

    def received(
        self, queries: QueryClass, *, relative: bool = True, min_viewers: int = 1
    ) -> Float[Tensor, "batch head key"]:
        """Received attention r_j of a class of queries, divided by e_j if relative; NaN where a key is undefined.

        Raises:
            ValueError: no reducer of the recording reads this class.
        """
        queries = checked_class(queries, "received")
        if queries not in self.sums:
            raise ValueError(f"received attention of {queries!r} queries: declare reads = ('received:{queries}',)")
        sums = self.sums[queries]
        if relative:
            sums = sums / self.facts.expected(queries)[:, None]
        return sums.masked_fill(self.undefined(queries, min_viewers)[:, None], torch.nan)

    def undefined(self, queries: QueryClass, min_viewers: int) -> Bool[Tensor, "batch key"]:
        """Keys that fewer than `min_viewers` (at least 1) queries of the class see, and padding."""
        return self.facts.undefined(queries, min_viewers)

    def only_keys(self, values: Float[Tensor, "batch *axes"], dim: int = -1) -> Float[Tensor, "batch *axes"]:
        """`values` with NaN at keys that are padding or, in an AR run, not written yet.

        Args:
            values: a number, or several, per key.
            dim: the axis of the keys; the last one, unless axes of the reducer's own come after it.

        Raises:
            ValueError: the axis has another size than the layer has keys.
        """
        return _blank(values, self.facts.absent_keys, dim, "only_keys")

    def only_queries(self, values: Float[Tensor, "batch *axes"], dim: int = -1) -> Float[Tensor, "batch *axes"]:
        """`values` with NaN at queries that are padding, not written yet (AR), or not computed (a cache).

        Args:
            values: a number, or several, per query.
            dim: the axis of the queries; the last one, unless axes of the reducer's own come after it.

        Raises:
            ValueError: the axis has another size than the layer has queries.
        """
        return _blank(values, self.facts.absent_queries, dim, "only_queries")


def _blank(values: Tensor, where: Bool[Tensor, "batch position"], dim: int, call: str) -> Tensor:
    rows, count = where.shape
    if not -values.ndim < dim < values.ndim or dim == 0 or values.shape[dim] != count:
        raise ValueError(
            f"{call} got shape {list(values.shape)} and dim={dim}, where it needs the {count} "
            f"{call.removeprefix('only_')}; say which axis they are with dim="
        )
    shape = [1] * values.ndim
    shape[0], shape[dim] = rows, count
    return values.masked_fill(where.reshape(shape), torch.nan)


class Statistic:
    """The attributes that `Reducer` and `PatternReducer` share; each has a default.

    A subclass overrides those that do not fit it, with a class attribute or a property.
    """

    @property
    def name(self) -> str:
        """The attribute of a `Recording` that holds the array; the name of the class in snake_case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def dims(self) -> tuple[str, ...]:
        """The axes of the array, in the order of `ARRAY_AXES`; one number per head and key.

        They begin with "step", "batch", "layer"; the recording adds step and layer, the reducer returns the rest.
        """
        return KEY_DIMS

    @property
    def unit(self) -> str:
        """The unit of the numbers; none."""
        return ""

    @property
    def formula(self) -> str:
        """The formula, with its source; none."""
        return ""

    @property
    def reads(self) -> tuple[str, ...]:
        """What is computed for the reducer beside queries, keys and values; nothing.

        "received:CLASS" for the column sums of a class of queries (`LayerStep.sums`), "query:STATISTIC" for a
        number per query (`LayerStep.per_query`), "resid_in" for the residual stream that enters the layer,
        "attn_out" for it and the output of attention, "resid_out" for the stream that leaves the layer (more
        memory: queries, keys and values are kept until then), "resid" for all three. All that is read of the
        pattern is computed in one pass.
        """
        return ()

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """Axis -> the names along it, for axes of the reducer's own; none."""
        return {}

    @property
    def positions(self) -> bool:
        """Whether the numbers are positions of keys, which change where prompts are padded; False."""
        return False

    @property
    def zero_padding(self) -> bool:
        """Whether a present query has 0, not NaN, at keys that its row lacks, as a share of attention is; False."""
        return False

    @property
    def stored_settings(self) -> Mapping[str, Any]:
        """The settings that a recording names and a continued one must share; the texts, numbers and flags."""
        found: dict[str, Any] = dict(vars(self)) if is_dataclass(self) else {}
        return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)}

    def check(self, model: Any, layers: tuple[int, ...]) -> None:
        """Raise a ValueError for a model or recorded layers that the reducer does not fit; by default none.

        Called before the first forward pass.
        """

    @property
    def parts(self) -> "tuple[AnyReducer, ...]":
        """The reducers of one array each that are recorded; this one alone."""
        assert isinstance(self, AnyReducer)
        return (self,)


class Reducer(Statistic, ABC):
    """A statistic of one layer at one step, computed without the attention pattern.

    A subclass is a frozen dataclass whose fields are its settings; see docs/add-a-reducer.md.
    """

    @abstractmethod
    def reduce(self, layer: LayerStep) -> Tensor:
        """The statistic: `dims` without step and layer."""


class PatternReducer(Statistic, ABC):
    """A statistic of one layer at one step that needs the attention pattern, which it gets in tiles of queries.

    All pattern reducers of a recording share one pass over the tiles.
    """

    @abstractmethod
    def start(self, layer: LayerStep) -> Any:
        """The state before the first tile."""

    @abstractmethod
    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Float[Tensor, "batch head tile key"]) -> Any:
        """The state after one more tile: `pattern` is the attention of the queries `rows`, in float32."""

    @abstractmethod
    def finish(self, state: Any, layer: LayerStep) -> Tensor:
        """The statistic: `dims` without step and layer."""


class ReducerGroup(ABC):
    """Several statistics that are recorded together, as `TopKeys` records positions and scores."""

    @property
    @abstractmethod
    def parts(self) -> "tuple[AnyReducer, ...]":
        """The reducers, one per array."""


AnyReducer = Reducer | PatternReducer


def checked_reducers(reducers: Any) -> tuple[AnyReducer, ...]:
    """The reducers of one array each: those that texts name, with groups replaced by their parts.

    Raises:
        ValueError: an object that is not a reducer, a text that names none, two reducers of one name, or dims or
            reads that do not exist.
    """
    found: list[AnyReducer] = []
    if isinstance(reducers, str):
        reducers = [reducers]
    if not isinstance(reducers, Iterable):
        raise ValueError(f"reducers is {shown(reducers)}; give a list, such as reducers=[ReceivedAttention()]")
    built = [named_reducers(one) if isinstance(one, str) else [one] for one in reducers]
    for reducer in chain.from_iterable(built):
        if not isinstance(reducer, Reducer | PatternReducer | ReducerGroup):
            raise ValueError(
                f"{shown(reducer)} is not a reducer; give one with its settings, such as ReceivedAttention(), its "
                "text, such as 'received:masked', or an instance of a class derived from "
                "dlm_lens.recording.Reducer or PatternReducer"
            )
        found += reducer.parts
    for reducer in found:
        _check(reducer)
    names = [reducer.name for reducer in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two reducers have the name {name!r}; a Recording finds a statistic by its name")
    return tuple(found)


def _check(reducer: AnyReducer) -> None:
    if not str(reducer.name).isidentifier():
        raise ValueError(
            f"the reducer's name {reducer.name!r} is not an identifier; a Recording has it as an attribute"
        )
    if tuple(reducer.dims[:3]) != ("step", "batch", "layer"):
        raise ValueError(f"{reducer.name} has dims {reducer.dims}; they begin with step, batch, layer")
    order = [ARRAY_AXES.index(name) for name in reducer.dims if name in ARRAY_AXES]
    if order != sorted(set(order)) or len(set(reducer.dims)) < len(reducer.dims):
        raise ValueError(
            f"{reducer.name} has dims {reducer.dims}; the order is {', '.join(ARRAY_AXES)}, then its own"
        )
    if reducer.zero_padding and not {"query", "key"} <= set(reducer.dims):
        raise ValueError(
            f"{reducer.name} has zero_padding and the dims {reducer.dims}; it is for shares that a query gives to "
            "keys, with both axes"
        )
    for read in reducer.reads:
        kind, _, what = read.partition(":")
        known = {"received": stored_name(what) in QUERY_CLASSES, "query": what in QUERY_STATS}
        if read not in STREAM_PARTS and not known.get(kind):
            raise ValueError(
                f"{reducer.name} reads {read!r}; it may read {', '.join(map(repr, STREAM_PARTS))}, "
                f"'received:CLASS' for the classes {', '.join(QUERY_CLASSES)}, and 'query:STATISTIC' for "
                f"{', '.join(QUERY_STATS)}"
            )
