"""Attention without a pattern: column hooks run on statistics of streamed tiles, then the fused kernel mixes.

A column hook is registered at `hook_scores` or `hook_pattern` as a `ColumnCall`. While no other hook is there,
attention calls its `hidden` for the columns to hide, with the received attention of each key summed tile by tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention.column_masking import ColumnMask, count_hidden, counted_queries
from dlm_lens.attention.column_stats import ColumnStats, DeferredColumnStats, expected_received, viewers
from dlm_lens.attention.hook_attachment import ColumnCall
from dlm_lens.attention.hook_context import PointContext
from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.received import attention_lse, received_sums
from dlm_lens.attention.softmax_variants import with_spare_key
from dlm_lens.attention.tiled import pattern_rows, pattern_tiles
from dlm_lens.placement import without_autocast

TILE = 128
"""Queries whose pattern is in memory at a time."""
WIDEST_FLASH = 256
"""Widest heads of torch's flash attention on CUDA."""


def stream_hidden(inputs: AttentionInputs, calls: Sequence[ColumnCall]) -> AttentionInputs:
    """Run column hooks in turn; each sees what the ones before it left visible.

    Columns hidden before the softmax are removed from `visible`, those hidden after it are `dropped`. At most one
    hook may drop, and it comes last (as `hook_pattern` comes after `hook_scores`).
    """
    seen = None if inputs.visible is None else inputs.visible.any((1, 2))
    least = _Least()
    for call in calls:
        context = call.context()
        keys = inputs.k.shape[2]
        counted = counted_queries(len(inputs.q), keys, keys, context, inputs.q.device, seen)[:, inputs.own]
        columns = DeferredColumnStats(partial(stream_columns, inputs, counted))
        with torch.no_grad():
            hidden = call.hook.hidden(keys, columns, context)
        if hidden is None:
            continue
        hidden = replace(
            hidden.resolved(inputs.q.shape[1], inputs.q.device), edge=least.edge(hidden, inputs, context)
        )
        count_hidden(call.hook.key, hidden, inputs.q.shape[0], inputs.q.shape[1], context, columns.found)
        if hidden.stage == "after" and not hidden.renormalise:
            return replace(inputs, dropped=hidden)
        # Hidden after the softmax with rows renormalised to 1 is the same as hidden before it.
        inputs = replace(inputs, visible=_left_visible(inputs, hidden))
    return inputs


@dataclass
class _Least:
    """How many keys every query sees at least, without reading it from a GPU, which would wait in every layer.

    Args:
        hidden: columns that the hooks so far may have hidden; None if that is not known.
    """

    hidden: int | None = 0

    def edge(self, hidden: ColumnMask, inputs: AttentionInputs, context: PointContext) -> int | None:
        """`ColumnMask.edge` of the next hook."""
        before = self.hidden
        counts = hidden.most is not None and not hidden.keep_self and hidden.keep is None
        self.hidden = before + (hidden.most or 0) if counts and before is not None else None
        if before is None or hidden.keep_self or hidden.keep is not None:
            return None
        visible = inputs.visible
        alike = visible is None or visible.shape[2] == 1 or (context.run is not None and context.run.alike)
        alike = alike and not inputs.causal
        if hidden.leaves_one and before == 0 and alike and inputs.window is None:
            return 0
        if hidden.most is None or (context.run is None and inputs.visible is not None):
            return None
        keys = inputs.k.shape[2]
        content = keys if context.run is None else context.run.fewest_content
        gone = before + hidden.most
        if inputs.window is not None and gone >= inputs.window:
            return None  # any window may lose all of its keys
        if context.causal or inputs.causal:
            # Query i sees i + 1 keys, padding among them.
            return min(keys, keys - content + gone)
        # Under a mask that differs from query to query (blocks, windows, another order) any query may see few keys.
        return 0 if alike and gone < content else None


def stream_columns(inputs: AttentionInputs, queries: Bool[Tensor, "batch query"]) -> ColumnStats:
    """Received attention of each key from the counted queries, summed in tiles of queries."""
    sums = received_by_class(inputs, queries[:, None].float()).squeeze(1)
    visible = inputs.seen()
    if visible is None:
        visible = torch.ones(1, 1, 1, sums.shape[-1], dtype=torch.bool, device=sums.device)
    if visible.shape[-2] > 1:
        expected, seen_by = expected_received(visible, queries), viewers(visible, queries)
    else:  # every query sees the same keys
        seen, count = visible.squeeze(-2), queries.sum(-1)[:, None, None]
        expected, seen_by = seen / seen.sum(-1, keepdim=True).clamp(min=1) * count, seen * count.float()
    return ColumnStats(sums, expected, seen_by, queries.sum(-1), queries.shape[-1])


@torch.no_grad()
def received_by_class(
    inputs: AttentionInputs, weights: Float[Tensor, "batch klass query"]
) -> Float[Tensor, "batch klass head key"]:
    """Received attention of each key from every class of queries, sum_i w_ci A_ij, without a pattern."""
    # Columns dropped after the softmax and edits of a pattern do not follow from the queries and keys.
    if inputs.pattern is None and inputs.dropped is None:
        visible, causal = visibility_of(inputs)
        return received_sums(
            inputs.q,
            inputs.k,
            scale=inputs.scale,
            visible=visible,
            queries=weights,
            causal=causal,
            lse=row_lse(inputs),
        )
    sums = torch.zeros(*inputs.q.shape[:2], weights.shape[1], inputs.k.shape[2], device=inputs.q.device)
    for rows, pattern in pattern_tiles(inputs):
        with without_autocast(sums.device):
            sums += weights[:, None, :, rows] @ pattern
    return sums.transpose(1, 2)


def row_lse(inputs: AttentionInputs) -> Float[Tensor, "batch head query"] | None:
    """The log-sum-exp of every row, with its spare entry; None without one where the kernel returned nothing."""
    if inputs.spare is None or inputs.lse is not None:
        return inputs.lse
    visible, causal = visibility_of(inputs)
    own = attention_lse(inputs.q, inputs.k, scale=inputs.scale, visible=visible, causal=causal)
    return torch.logaddexp(own, inputs.spare.to(own)[:, None])


def visibility_of(inputs: AttentionInputs) -> tuple[Bool[Tensor, "batch #head #query key"] | None, bool]:
    """Which keys the queries see, and whether causality hides more (if the queries are the last positions)."""
    last = inputs.own_start is None or inputs.own_start == inputs.k.shape[2] - inputs.q.shape[2]
    causal = inputs.causal and last
    return inputs.visible if causal or not inputs.causal else inputs.seen(), causal


def stream_mix(
    inputs: AttentionInputs, learned: Float[Tensor, "head"] | None = None
) -> Float[Tensor, "batch query head d_head"]:
    """Mix the values with the fused kernel, with `visible` and `dropped` applied.

    Args:
        inputs: of the layer; with a spare entry nothing is dropped.
        learned: logits of the spare entry; None for 0.
    """
    values = inputs.v
    if inputs.dropped is not None:
        # A_ij stays and v_j is zero: the entry is gone, its row keeps its normaliser.
        groups = inputs.q.shape[1] // values.shape[1]
        values = values.repeat_interleave(groups, 1)
        values = values.masked_fill(inputs.dropped.columns[..., None], 0.0)
    z = _fused(inputs, values, learned).transpose(1, 2)
    return z if inputs.dropped is None else _with_kept_rows(inputs, inputs.dropped, z)


def _fused(
    inputs: AttentionInputs, values: Tensor, learned: Tensor | None
) -> Float[Tensor, "batch head query d_head"]:
    groups = inputs.q.shape[1] // inputs.k.shape[1]
    k = inputs.k if values.shape[1] == inputs.k.shape[1] else inputs.k.repeat_interleave(groups, 1)
    mask = inputs.visible
    causal = inputs.causal
    wide = inputs.spare is not None
    if mask is not None or (causal and (wide or inputs.q.shape[2] != inputs.k.shape[2])):
        mask, causal = inputs.seen(), False
    q = inputs.q
    if wide:
        q, k, values, mask = with_spare_key(q, k, values, mask, learned, inputs.scale)
    if k.shape[1] != q.shape[1] and not _reads_grouped(q, mask):
        k, values = k.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    z = nn.functional.scaled_dot_product_attention(
        q,
        k,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=inputs.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return z[..., : inputs.v.shape[-1]]


def _reads_grouped(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel takes fewer key heads than query heads: elsewhere torch may form the pattern.

    On CUDA flash attention alone does, which knows no mask and no float32 (transformers' sdpa function decides so
    too, but for float32).
    """
    return q.device.type == "cpu" or (mask is None and q.dtype.itemsize == 2 and q.shape[-1] <= WIDEST_FLASH)


def _left_visible(inputs: AttentionInputs, hidden: ColumnMask) -> Bool[Tensor, "batch head #query key"]:
    """Visibility without the hidden columns; its query axis keeps size 1 while no row ends empty."""
    seen = inputs.seen()
    if not hidden.keep_self and hidden.keep is None and (seen is None or seen.shape[-2] == 1):
        left = ~hidden.columns[:, :, None, :]
        left = left if seen is None else left & seen
        if hidden.edge == 0 or bool(left.any(-1).all()):
            return left
    if seen is None:
        seen = torch.ones(1, 1, 1, inputs.k.shape[2], dtype=torch.bool, device=inputs.q.device)
    seen = seen.expand(-1, -1, inputs.q.shape[2], -1)
    return seen & ~hidden.entries(seen, inputs.own)


def _with_kept_rows(inputs: AttentionInputs, dropped: ColumnMask, z: Tensor) -> Tensor:
    """Rows that keep an entry of a dropped column get their z from their pattern."""
    keeping = _keeping_rows(inputs, dropped)
    grouped_values = inputs.v.float().unsqueeze(2)
    for rows in keeping.split(TILE):
        pattern, seen = pattern_rows(inputs, rows), inputs.seen(rows)
        seen = torch.ones_like(pattern, dtype=torch.bool) if seen is None else seen.expand_as(pattern)
        pattern = pattern.masked_fill(dropped.entries(seen, inputs.own[rows]), 0.0)
        grouped = rearrange(pattern, "b (g n) q k -> b g n q k", g=inputs.v.shape[1])
        mixed = rearrange(grouped @ grouped_values, "b g n q d -> b q (g n) d")
        z = z.index_copy(1, rows, mixed.to(z.dtype))
    return z


def _keeping_rows(inputs: AttentionInputs, dropped: ColumnMask) -> Int[Tensor, "row"]:
    """Queries that keep something of a dropped column: their own edge, or all of a row that would end empty."""
    queries = inputs.q.shape[2]
    if dropped.keep is not None:
        return torch.arange(queries, device=inputs.q.device)
    if dropped.edge is not None and not dropped.keep_self:
        return torch.arange(min(queries, dropped.edge), device=inputs.q.device)
    seen = inputs.seen()
    if seen is None or seen.shape[-2] == 1:
        left = ~dropped.columns if seen is None else ~dropped.columns & seen.squeeze(-2)
        kept = torch.full((queries,), not bool(left.any(-1).all()), device=inputs.q.device)
    else:
        parts = [
            (inputs_seen & ~dropped.columns[:, :, None]).any(-1).logical_not().flatten(0, 1).any(0)
            for inputs_seen in seen.split(TILE, -2)
        ]
        kept = torch.cat(parts)
    if dropped.keep_self:
        kept = kept | dropped.columns[..., inputs.own].flatten(0, 1).any(0)
    return kept.nonzero().squeeze(-1)
