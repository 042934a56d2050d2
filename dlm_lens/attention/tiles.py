"""The pattern tile by tile, without one of [head, query, key]."""

from collections.abc import Iterator

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.tiled import LOG2E, exponentials_, hide_, needs_grad, score_tile

TILE_ENTRIES = 2**20
"""Entries of a tile of the pattern: 4 MiB in float32."""


def pattern_tiles(
    inputs: AttentionInputs, tile: int | None = None
) -> Iterator[tuple[slice, Float[Tensor, "batch head tile key"]]]:
    """Yield the pattern `tile` queries at a time, in float32; a query without a visible key has zeros.

    By default as many queries as fit `TILE_ENTRIES`, so that memory does not grow with the length. What is
    dropped behind the softmax is zero too. Each tile is a new tensor, which a reducer may keep or edit.
    """
    batch, heads, queries, _ = inputs.q.shape
    tile = tile or max(1, min(queries, TILE_ENTRIES // (batch * heads * inputs.k.shape[2])))
    by_head = inputs.q.device.type == "cpu" and not needs_grad(inputs.q, inputs.k)
    keys = inputs.k.float().contiguous()
    for start in range(0, queries, tile):
        rows = slice(start, min(start + tile, queries))
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
