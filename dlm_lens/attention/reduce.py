"""Reducers: statistics of attention taken tile by tile, without a pattern of [head, query, key]."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.hiding import Hidden
from dlm_lens.attention.tiled import LOG2E, exponentials_, hide_, needs_grad, score_tile


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What one attention module computes with, handed to reducers.

    Args:
        layer: index of the layer.
        q: queries after rotation; without the rows of learned sink tokens.
        k: keys after rotation, in the network's order of positions, sink tokens among them.
        v: values.
        scale: scores are q k^T scale.
        visible: which query sees which key, hidden columns left out; None for all. The query axis may have size 1.
        causal: a query sees nothing behind its own position, on top of `visible`.
        queries: which queries count; None for all.
        regions: named sets of keys (prompt, block, sinks, ...), so that this room need not know of sampling.
        output: W_O per query head.
        dropped: columns that are hidden behind the softmax.
        own_start: the key at which the first query stands; None if the queries are the last positions.
        pattern: the pattern as used, where somebody had it materialised (and may have edited it).
        z: what the pattern mixed from the values, where it is known.
    """

    layer: int
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    visible: Bool[Tensor, "batch #head #query key"] | None = None
    queries: Bool[Tensor, "batch query"] | None = None
    regions: Mapping[str, Bool[Tensor, "batch key"]] = field(default_factory=dict)
    output: Float[Tensor, "head d_head d_model"] | None = None
    causal: bool = False
    own_start: int | None = None
    dropped: Hidden | None = None
    pattern: Float[Tensor, "batch head query key"] | None = None
    z: Float[Tensor, "batch query head d_head"] | None = None

    @property
    def own(self) -> Int[Tensor, "query"]:
        """Each query's own position among the keys; without `own_start` the queries are the last positions."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        start = keys - queries if self.own_start is None else self.own_start
        return torch.arange(start, start + queries, device=self.q.device)

    def seen(self, rows: slice | Tensor = slice(None)) -> Bool[Tensor, "#batch #head query key"] | None:
        """Who sees whom among the queries `rows`, causality included; None where everyone sees everything."""
        visible = self.visible
        if visible is not None and visible.shape[-2] > 1:
            visible = visible[:, :, rows]
        if not self.causal:
            return visible
        before = torch.arange(self.k.shape[2], device=self.q.device) <= self.own[rows, None]
        return before[None, None] if visible is None else visible & before


class Reducer(Protocol):
    """A statistic of attention: it sees the pattern in tiles of queries and keeps only what it reports.

    `name`, `dims` (in the design's axis order) and `unit` describe the result of `finish`. `start` returns the
    running state, `tile` the state after some more queries, `finish` the statistic.
    """

    name: str
    dims: tuple[str, ...]
    unit: str

    def start(self, inputs: AttentionInputs) -> Any:
        """The state before the first tile."""
        ...

    def tile(
        self, state: Any, inputs: AttentionInputs, rows: slice, pattern: Float[Tensor, "batch head tile key"]
    ) -> Any:
        """The state after the queries `rows`, whose attention is `pattern`."""
        ...

    def finish(self, state: Any, inputs: AttentionInputs) -> Tensor:
        """The statistic."""
        ...


def pattern_tiles(
    inputs: AttentionInputs, tile: int = 128
) -> Iterator[tuple[slice, Float[Tensor, "batch head tile key"]]]:
    """Yield the pattern `tile` queries at a time, in float32; a query without a visible key has zeros.

    What is dropped behind the softmax is zero too. Each tile is a new tensor, which a reducer may keep or edit.
    """
    by_head = inputs.q.device.type == "cpu" and not needs_grad(inputs.q, inputs.k)
    keys = inputs.k.float().contiguous()
    for start in range(0, inputs.q.shape[2], tile):
        rows = slice(start, min(start + tile, inputs.q.shape[2]))
        if inputs.pattern is not None:
            yield rows, inputs.pattern[:, :, rows].float().clone()
            continue
        pattern = _tile_by_head(inputs, keys, rows) if by_head else _tile_at_once(inputs, keys, rows)
        if inputs.dropped is not None:
            seen = inputs.seen(rows)
            seen = torch.ones_like(pattern, dtype=torch.bool) if seen is None else seen.expand_as(pattern)
            pattern = pattern.masked_fill(inputs.dropped.entries(seen, inputs.own[rows]), 0.0)
        yield rows, pattern


def pattern_rows(inputs: AttentionInputs, rows: slice | Int[Tensor, "row"]) -> Float[Tensor, "batch head row key"]:
    """The pattern of some queries in float32, before anything is dropped."""
    return _tile_at_once(inputs, inputs.k.float(), rows)


def _tile_at_once(
    inputs: AttentionInputs, keys: Tensor, rows: slice | Tensor
) -> Float[Tensor, "batch head tile key"]:
    """One batched product: for GPUs, and differentiable."""
    q = rearrange(inputs.q[:, :, rows].float() * inputs.scale, "b (g n) q d -> b g n q d", g=keys.shape[1])
    scores = rearrange(q @ keys.unsqueeze(2).mT, "b g n q k -> b (g n) q k")
    visible = inputs.seen(rows)
    if visible is None:
        return scores.softmax(-1)
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1) * visible


def _tile_by_head(inputs: AttentionInputs, keys: Tensor, rows: slice) -> Float[Tensor, "batch head tile key"]:
    """Head by head in the CPU's cache, half the time of the batched product (`benchmarks/received.py`)."""
    q = (inputs.q[:, :, rows].float() * (inputs.scale * LOG2E)).contiguous()
    visible = inputs.seen(rows)
    hidden = None if visible is None else (~visible).view(torch.uint8)
    pattern = q.new_empty(*q.shape[:3], keys.shape[2])
    groups = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = score_tile(q[row, head], keys[row, head // groups])
            if hidden is not None:
                hide_(scores, hidden[row % len(hidden), head % hidden.shape[1]].expand_as(scores))
            _, total = exponentials_(scores)
            torch.div(scores, total[:, None], out=pattern[row, head])
    return pattern


def reduce_attention(inputs: AttentionInputs, reducers: Sequence[Reducer], tile: int = 128) -> dict[str, Tensor]:
    """Run all reducers over one pass of tiles: memory is [batch, head, tile, key], not [.., query, key]."""
    states = [reducer.start(inputs) for reducer in reducers]
    for rows, pattern in pattern_tiles(inputs, tile):
        states = [
            reducer.tile(state, inputs, rows, pattern) for reducer, state in zip(reducers, states, strict=True)
        ]
    return {reducer.name: reducer.finish(state, inputs) for reducer, state in zip(reducers, states, strict=True)}
