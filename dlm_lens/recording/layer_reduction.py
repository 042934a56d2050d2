"""The reduction of one layer: keys in canvas order, one pass over the pattern, all reducers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import (
    QUERY_STATS,
    AttentionInputs,
    ColumnMask,
    PatternStats,
    QueryStat,
    SinkLayout,
    TileStats,
    pattern_stats,
    pattern_tiles,
)
from dlm_lens.printable import shown
from dlm_lens.recording.query_classes import QueryClass, checked_class
from dlm_lens.recording.reducers.base import AnyReducer, LayerStep, PatternReducer


def classes_read(reducers: Sequence[AnyReducer]) -> tuple[QueryClass, ...]:
    """The classes of queries whose column sums a reducer reads, each once."""
    reads = [read for reducer in reducers for read in reducer.reads if read.startswith("received:")]
    return tuple(dict.fromkeys(checked_class(read.partition(":")[2], "reads") for read in reads))


def query_stats_read(reducers: Sequence[AnyReducer]) -> tuple[QueryStat, ...]:
    """The statistics per query that a reducer reads, each once."""
    reads = {read.partition(":")[2] for reducer in reducers for read in reducer.reads if read.startswith("query:")}
    return tuple(name for name in QUERY_STATS if name in reads)


def on_canvas(inputs: AttentionInputs, rows: int, layout: SinkLayout) -> AttentionInputs:
    """The first `rows` rows (the conditional half under guidance), keys in the order canvas, learned sinks.

    Raises:
        ValueError: fewer queries than canvas positions that no span explains, or another batch size.
    """
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    if inputs.q.shape[0] % rows:
        raise ValueError(f"{inputs.q.shape[0]} rows of attention do not fit a run of {rows} rows")
    if queries != keys - layout.count and inputs.own_start is None:
        raise ValueError(
            f"attention has {queries} queries for {keys - layout.count} positions: a statistic of received "
            "attention needs every query, so run without a cache (use_cache=False)"
        )

    def part(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] <= rows else tensor[:rows]

    def ordered(tensor: Tensor | None, axis: int) -> Any:
        tensor = part(tensor)
        return tensor if tensor is None else layout.sinks_last(tensor, axis)

    dropped = inputs.dropped
    if dropped is not None:
        dropped = replace(dropped, columns=ordered(dropped.columns, -1), keep=_kept_on_canvas(dropped, layout))
    return replace(
        inputs,
        q=inputs.q[:rows],
        k=ordered(inputs.k, 2),
        v=ordered(inputs.v, 2),
        visible=ordered(inputs.visible, -1),
        pattern=ordered(inputs.pattern, -1),
        z=part(inputs.z),
        lse=part(inputs.lse),
        dropped=dropped,
        own_start=0 if layout.count else inputs.own_start,
    )


def _kept_on_canvas(
    dropped: ColumnMask, layout: SinkLayout
) -> Callable[[Int[Tensor, "query"], int], Bool[Tensor, "query key"]] | None:
    """The keys that each query keeps, by its canvas position, with the keys in the order canvas, learned sinks."""
    keep = dropped.keep
    if keep is None or not layout.count:
        return keep

    def ordered(own: Int[Tensor, "query"], keys: int) -> Bool[Tensor, "query key"]:
        return layout.sinks_last(keep(own + layout.canvas(keys).start, keys), 1)

    return ordered


def on_all_queries(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs with queries at a span of the canvas alone, with 0 as the other queries, and NaN as their outputs."""
    start, keys = inputs.first, inputs.k.shape[2]
    after = keys - start - inputs.q.shape[2]

    def widened(tensor: Tensor | None, axis: int, value: float) -> Any:
        if tensor is None or (tensor.dtype == torch.bool and tensor.shape[axis] == 1):
            return tensor
        shape = list(tensor.shape)
        parts = [tensor.new_full([*shape[:axis], n, *shape[axis + 1 :]], value) for n in (start, after)]
        return torch.cat([parts[0], tensor, parts[1]], axis)

    return replace(
        inputs,
        q=widened(inputs.q, 2, 0.0),
        z=widened(inputs.z, 1, torch.nan),
        pattern=widened(inputs.pattern, 2, 0.0),
        visible=widened(inputs.visible, 2, True),
        lse=None,
        own_start=0,
    )


def reduce_layer(
    layer: LayerStep, reducers: Sequence[AnyReducer], computed: AttentionInputs | None = None
) -> dict[str, Tensor]:
    """Name -> statistic of a layer for every reducer, in at most one pass over the scores.

    Args:
        layer: with every query of the canvas.
        reducers: of one array each.
        computed: the same inputs with the computed queries alone, where those are a span of the canvas.
    """
    classes, wanted = classes_read(reducers), query_stats_read(reducers)
    tiled = [reducer for reducer in reducers if isinstance(reducer, PatternReducer)]
    weights = layer.facts.weights(classes) if classes else None
    states: dict[str, Any] = {}
    if tiled:
        stats, states = _tiled(layer, tiled, weights, wanted)
    else:
        stats = _stats(layer, weights, wanted, layer.inputs if computed is None else computed)
    sums = {} if stats.sums is None else dict(zip(classes, stats.sums.unbind(1), strict=True))
    layer = replace(layer, sums=sums, per_query=stats.per_query)
    return {
        reducer.name: _statistic(
            reducer,
            layer,
            reducer.finish(states[reducer.name], layer)
            if isinstance(reducer, PatternReducer)
            else reducer.reduce(layer),
        )
        for reducer in reducers
    }


def _statistic(reducer: AnyReducer, layer: LayerStep, value: Any) -> Tensor:
    """What a reducer returned of a layer.

    Raises:
        ValueError: no tensor, or one of another number of axes, or of another size along one, than its dims say.
    """
    names = [name for name in reducer.dims if name not in ("step", "layer")]
    if not isinstance(value, Tensor):
        raise ValueError(f"{reducer!r} returned {shown(value)}; return a tensor [{', '.join(names)}]")
    if value.ndim != len(names):
        raise ValueError(
            f"{reducer!r} returned shape {list(value.shape)}; its dims {reducer.dims} without step and layer need "
            f"{len(names)} axes"
        )
    q, k = layer.inputs.q.shape, layer.inputs.k.shape
    sizes = {"batch": q[0], "head": q[1], "kv_head": k[1], "query": q[2], "key": k[2]}
    for name, size in zip(names, value.shape, strict=True):
        if size != sizes.get(name, size):
            known = ", ".join(f"{each} {count}" for each, count in sizes.items())
            raise ValueError(
                f"{reducer!r} returned {size} entries along its axis {name!r}, and layer {layer.index} has {known}"
                f"; return {sizes[name]}, or name the axis in dims after what it holds"
            )
    return value


def _stats(
    layer: LayerStep,
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Sequence[QueryStat],
    inputs: AttentionInputs,
) -> PatternStats:
    """The column sums of every class and the statistics per query, of the queries in `inputs`; 0 for the others."""
    queries, count = layer.inputs.q.shape[2], inputs.q.shape[2]
    start = 0 if count == queries else inputs.first
    part = slice(start, start + count)
    stats = pattern_stats(
        inputs,
        None if weights is None else weights[:, :, part],
        wanted,
        counted=layer.facts.attending[:, part],
        canvas=queries,
    )
    if count == queries:
        return stats
    sides = (start, queries - part.stop)
    widened = {name: torch.nn.functional.pad(values, sides) for name, values in stats.per_query.items()}
    return PatternStats(stats.sums, widened)


def _tiled(
    layer: LayerStep,
    reducers: Sequence[PatternReducer],
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Sequence[QueryStat],
) -> tuple[PatternStats, dict[str, Any]]:
    """The statistics that reducers read and the final state of every pattern reducer, tile by tile."""
    states = {reducer.name: reducer.start(layer) for reducer in reducers}
    stats = TileStats(layer.inputs, weights, wanted, layer.inputs.q.shape[2])
    for rows, pattern in pattern_tiles(layer.inputs):
        stats.add(rows, pattern)
        states = {r.name: r.tile(states[r.name], layer, rows, pattern) for r in reducers}
    return stats.result(), states
