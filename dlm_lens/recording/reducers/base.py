"""What a reducer looks like, and what it is shown: one layer in one step."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import AttentionInputs, RunStep
from dlm_lens.printable import shown
from dlm_lens.recording.query_classes import CLASSES, CanvasFacts, QueryClass

AXES = ("step", "batch", "layer", "head", "kv_head", "query", "key")
"""Axes that a statistic may have, in this order; a reducer may add axes of its own behind them."""


@dataclass(frozen=True, eq=False)
class LayerStep:
    """One layer in one step, as a reducer sees it.

    Rows are the prompts: of a guided forward the conditional half. Queries are the canvas's positions; keys are
    the canvas's and, behind them, the model's learned sink tokens, wherever those stand in the network.

    Args:
        index: of the layer.
        inputs: rotated queries and keys, values, and who sees whom; `inputs.z` is what attention mixed, per head.
        run: the run's step: tokens, masked, valid, prompt, block, ...
        facts: the same as classes of queries, with the attention that they would spread evenly.
        sums: r_j = sum_i A_ij by class of queries, those that a reducer declared.
        regions: keys by name: prompt, masked, unmasked, block, sink (the learned sink tokens).
        weight: W_O of every head, [head, d_head, d_model].
        resid: the residual stream that enters the layer (declare "resid").
        attn_out: what attention adds to it (declare "resid").
        memory: what reducers keep from step to step of one run, for this layer.
    """

    index: int
    inputs: AttentionInputs
    run: RunStep
    facts: CanvasFacts
    sums: Mapping[QueryClass, Float[Tensor, "batch head key"]] = field(default_factory=dict)
    regions: Mapping[str, Bool[Tensor, "batch key"]] = field(default_factory=dict)
    weight: Callable[[], Float[Tensor, "head d_head d_model"]] | None = None
    resid: Float[Tensor, "batch key d_model"] | None = None
    attn_out: Float[Tensor, "batch key d_model"] | None = None
    memory: MutableMapping[Any, Any] = field(default_factory=dict)

    def received(
        self, queries: QueryClass, *, relative: bool = True, min_viewers: int = 1
    ) -> Float[Tensor, "batch head key"]:
        """Received attention r_j of a class of queries, divided by e_j if relative; NaN where a key is undefined.

        Raises:
            ValueError: no reducer declared that it reads this class.
        """
        if queries not in self.sums:
            raise ValueError(f"received attention of {queries!r} queries: declare reads = ('received:{queries}',)")
        sums = self.sums[queries]
        if relative:
            sums = sums / self.facts.expected(queries)[:, None]
        return sums.masked_fill(self.undefined(queries, min_viewers)[:, None], torch.nan)

    def undefined(self, queries: QueryClass, min_viewers: int) -> Bool[Tensor, "batch key"]:
        """Keys that fewer than `min_viewers` (at least 1) queries of the class see, and padding."""
        few = self.facts.viewers(queries) < max(1, min_viewers)
        return few | ~self.facts.keys

    def only_keys(self, values: Float[Tensor, "batch *axes key"]) -> Float[Tensor, "batch *axes key"]:
        """`values` with NaN at padding."""
        return _blank(values, ~self.facts.keys)

    def only_queries(self, values: Float[Tensor, "batch *axes query"]) -> Float[Tensor, "batch *axes query"]:
        """`values` with NaN at the queries that are padding."""
        return _blank(values, ~self.facts.present)


def _blank(values: Tensor, where: Bool[Tensor, "batch position"]) -> Tensor:
    for _ in range(values.ndim - 2):
        where = where.unsqueeze(1)
    return values.masked_fill(where, torch.nan)


class Statistic(Protocol):
    """What a reducer says of itself.

    `name` is how a Recording calls it. `dims` begin with ("step", "batch", "layer"), which record adds and joins;
    the tensor that the reducer returns has batch and the rest. Keys and queries are called "key" and "query", so
    that a Recording can pad them. `unit` and `formula` are text. `reads` may hold "received:CLASS" for the column
    sums of a class of queries and "resid" for the residual stream; queries, keys and values are always there.
    """

    @property
    def name(self) -> str:
        """How a Recording calls the statistic."""
        ...

    @property
    def dims(self) -> tuple[str, ...]:
        """The axes, step, batch and layer first."""
        ...

    @property
    def unit(self) -> str:
        """The unit of the numbers."""
        ...

    @property
    def formula(self) -> str:
        """The formula, with its source."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """What it asks for."""
        ...


@runtime_checkable
class Reducer(Statistic, Protocol):
    """A statistic of one layer in one step, from anything but the pattern: a small frozen value."""

    def reduce(self, layer: LayerStep) -> Tensor:
        """The statistic, without the axes step and layer."""
        ...


@runtime_checkable
class PatternReducer(Statistic, Protocol):
    """A statistic that needs the pattern itself, which it sees in tiles of queries: a small frozen value."""

    def start(self, layer: LayerStep) -> Any:
        """The state before the first tile."""
        ...

    def tile(self, state: Any, layer: LayerStep, rows: slice, pattern: Float[Tensor, "batch head tile key"]) -> Any:
        """The state after the queries `rows`, whose attention is `pattern`, float32."""
        ...

    def finish(self, state: Any, layer: LayerStep) -> Tensor:
        """The statistic, without the axes step and layer."""
        ...


AnyReducer = Reducer | PatternReducer


def checked_reducers(reducers: Any) -> tuple[AnyReducer, ...]:
    """The reducers one by one, those of several statistics taken apart (`parts`).

    Raises:
        ValueError: something that is none, two of one name, or dims or reads that cannot be.
    """
    found: list[AnyReducer] = []
    if isinstance(reducers, str) or not isinstance(reducers, Iterable):
        raise ValueError(f"reducers is {shown(reducers)}; give a list, such as reducers=[ReceivedAttention()]")
    for reducer in reducers:
        parts = None if isinstance(reducer, type) else getattr(reducer, "parts", None)
        found += parts or (reducer,)
    if not found:
        raise ValueError("no reducers given; take some of dlm_lens.recording, such as ReceivedAttention()")
    for reducer in found:
        _check(reducer)
    names = [reducer.name for reducer in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two reducers are called {name!r}; a Recording finds a statistic by its name")
    return tuple(found)


def _check(reducer: Any) -> None:
    if isinstance(reducer, type) or not isinstance(reducer, AnyReducer):
        raise ValueError(
            f"{shown(reducer)} is no reducer; give one with its settings, such as ReceivedAttention(), or an "
            "object with name, dims, unit, formula, reads and either reduce(layer) or start, tile and finish"
        )
    if not str(reducer.name).isidentifier():
        raise ValueError(
            f"the reducer's name {reducer.name!r} is no identifier; a Recording has it as an attribute"
        )
    if tuple(reducer.dims[:3]) != ("step", "batch", "layer"):
        raise ValueError(f"{reducer.name} has dims {reducer.dims}; they begin with step, batch, layer")
    order = [AXES.index(name) for name in reducer.dims if name in AXES]
    if order != sorted(set(order)) or len(set(reducer.dims)) < len(reducer.dims):
        raise ValueError(f"{reducer.name} has dims {reducer.dims}; the order is {', '.join(AXES)}, then its own")
    for read in reducer.reads:
        kind, _, queries = read.partition(":")
        if read != "resid" and not (kind == "received" and queries in CLASSES):
            raise ValueError(
                f"{reducer.name} reads {read!r}; it may read 'resid', and 'received:CLASS' for the classes "
                f"{', '.join(CLASSES)}"
            )
