"""Reducers: statistics of attention taken tile by tile, without a pattern of [head, query, key]."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What one attention module computes with, handed to reducers.

    `q` and `k` are rotated. `visible` None means that every query sees every key; `queries` None, that all
    count. `regions` are named sets of keys (prompt, block, sinks, ...) as masks, so that this room needs to
    know nothing of sampling. `output` is W_O per query head.
    """

    layer: int
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    visible: Bool[Tensor, "batch #head query key"] | None = None
    queries: Bool[Tensor, "batch query"] | None = None
    regions: Mapping[str, Bool[Tensor, "batch key"]] = field(default_factory=dict)
    output: Float[Tensor, "head d_head d_model"] | None = None


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
    """Yield the pattern `tile` queries at a time, in float32; a query without a visible key has zeros."""
    groups = inputs.q.shape[1] // inputs.k.shape[1]
    keys = inputs.k.float().unsqueeze(2).mT
    for start in range(0, inputs.q.shape[2], tile):
        rows = slice(start, min(start + tile, inputs.q.shape[2]))
        q = rearrange(inputs.q[:, :, rows].float(), "b (g n) q d -> b g n q d", n=groups)
        scores = rearrange(q @ keys, "b g n q k -> b (g n) q k") * inputs.scale
        if inputs.visible is None:
            yield rows, scores.softmax(-1)
            continue
        visible = inputs.visible[:, :, rows]
        pattern = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        yield rows, pattern * visible


def reduce_attention(inputs: AttentionInputs, reducers: Sequence[Reducer], tile: int = 128) -> dict[str, Tensor]:
    """Run all reducers over one pass of tiles: memory is [batch, head, tile, key], not [.., query, key]."""
    states = [reducer.start(inputs) for reducer in reducers]
    for rows, pattern in pattern_tiles(inputs, tile):
        states = [
            reducer.tile(state, inputs, rows, pattern) for reducer, state in zip(reducers, states, strict=True)
        ]
    return {reducer.name: reducer.finish(state, inputs) for reducer, state in zip(reducers, states, strict=True)}
