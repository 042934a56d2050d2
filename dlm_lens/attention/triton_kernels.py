"""Triton kernels of `received_sums`, `attention_lse` and `pattern_stats`; imported only where they run.

Two passes over q k^T. The first takes the log-sum-exp of every query and, where they are wanted, its statistics;
the second sums 2^(score - lse) per key and class of queries. Each program owns a block of keys (or of queries) and
walks along the other axis, so that nothing is summed by atomics: the same inputs give the same bits. Products take
the inputs' dtype (float32 without TF32) and are accumulated in float32, as is everything computed from them.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

LOG2E = math.log2(math.e)
NO_MASK, KEY_MASK, FULL_MASK = 0, 1, 2


@triton.jit
def _rows(base, index, stride_row, stride_column, width, length, WIDTH: tl.constexpr):
    """A block of rows of a [length, width] matrix, zeros beyond its edges."""
    column = tl.arange(0, WIDTH)
    inside = (index[:, None] < length) & (column[None, :] < width)
    # A row of fused projections is wide, and 2^31 entries are 175,000 rows of 12,288: offsets are 64 bits.
    rows = base + index[:, None].to(tl.int64) * stride_row
    return tl.load(rows + column[None, :].to(tl.int64) * stride_column, mask=inside, other=0.0)


@triton.jit
def _store_all(base, size, mask, entropy, itself, past, future, divisor):
    """A block of every statistic, `size` numbers apart."""
    tl.store(base, entropy, mask=mask)
    tl.store(base + size, itself / divisor, mask=mask)
    tl.store(base + 2 * size, past / divisor, mask=mask)
    tl.store(base + 3 * size, future / divisor, mask=mask)


@triton.jit(do_not_specialize=["first", "canvas"])  # one kernel for every span
def _query_kernel(
    q, k, visible, lse, stats,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_query, v_key,
    heads, groups, queries, keys, width, factor, first, canvas,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of the visible scores of a block of queries; -inf where nothing is visible.

    With `STATS` also each query's entropy in nats and what it gives to itself and to the canvas keys before and
    after it, 0 where nothing is visible: `pattern_reductions.QUERY_STATS`, in that order.
    """
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    own = _rows(q + row * q_batch + head * q_head, query, q_row, q_column, width, queries, WIDTH)
    k += row * k_batch + (head // groups) * k_head
    visible += row * v_batch + head * v_head
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    # Sums over the keys of 2^s s, and of 2^s of some keys, s a base-2 score minus the greatest one so far.
    product = tl.zeros([QUERIES], tl.float32)
    itself = tl.zeros([QUERIES], tl.float32)
    past = tl.zeros([QUERIES], tl.float32)
    future = tl.zeros([QUERIES], tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(0, (tl.program_id(0) + 1) * QUERIES + keys - queries))
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        block = _rows(k, key, k_row, k_column, width, keys, WIDTH)
        scores = tl.dot(own, tl.trans(block), input_precision="ieee") * factor
        seen = (query[:, None] < queries) & (key[None, :] < keys)
        if MASK == 1:
            seen &= (tl.load(visible + key.to(tl.int64) * v_key, mask=key < keys, other=0) != 0)[None, :]
        if MASK == 2:
            where = visible + query[:, None].to(tl.int64) * v_query + key[None, :].to(tl.int64) * v_key
            seen &= tl.load(where, mask=seen, other=0) != 0
        if CAUSAL:
            seen &= key[None, :] <= query[:, None] + (keys - queries)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        # While a query has seen nothing its maximum is -inf, and -inf + inf is not a number.
        shift = tl.where(new == -float("inf"), 0.0, new)
        decay = tl.exp2(top - shift)
        share = tl.exp2(scores - shift[:, None])
        if STATS:
            earlier = product + total * tl.where(top == -float("inf"), 0.0, top - shift)
            product = earlier * decay + tl.sum(share * tl.where(seen, scores - shift[:, None], 0.0), 1)
            column, place = key[None, :], (first + query)[:, None]
            given = tl.where(column < canvas, share, 0.0)
            itself = itself * decay + tl.sum(tl.where(column == place, given, 0.0), 1)
            past = past * decay + tl.sum(tl.where(column < place, given, 0.0), 1)
            future = future * decay + tl.sum(tl.where(column > place, given, 0.0), 1)
        total = total * decay + tl.sum(share, 1)
        top = new
    if STATS:
        size = tl.num_programs(1).to(tl.int64) * queries
        stats += tl.program_id(1).to(tl.int64) * queries + query
        divisor = tl.where(total > 0.0, total, 1.0)  # the other sums are 0 where this one is
        # log sum_j 2^s_j - sum_j A_ij s_j, where every s_j is at most 0: both terms are positive.
        entropy = (tl.log2(divisor) - product / divisor) * 0.6931471805599453
        _store_all(stats, size, query < queries, tl.maximum(entropy, 0.0), itself, past, future, divisor)
    result = tl.where(total > 0.0, top + tl.log2(total), -float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + query, result, mask=query < queries)


@triton.jit
def _received_kernel(
    q, k, visible, lse, weights, received,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_query, v_key, w_batch, w_class, w_query,
    heads, groups, queries, keys, width, factor,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    CLASSES: tl.constexpr, CLASS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Class-split column sums of a block of keys, r_cj = sum_i w_ci 2^(score_ij - lse_i)."""
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    own = _rows(k + row * k_batch + (head // groups) * k_head, key, k_row, k_column, width, keys, WIDTH)
    q += row * q_batch + head * q_head
    visible += row * v_batch + head * v_head
    lse += tl.program_id(1).to(tl.int64) * queries
    weights += row * w_batch
    label = tl.arange(0, CLASS_BLOCK)
    sums = tl.zeros([KEYS, CLASS_BLOCK], tl.float32)
    begin = 0
    if CAUSAL:  # earlier queries see none of these keys
        begin = tl.maximum(0, tl.program_id(0) * KEYS - (keys - queries)) // QUERIES * QUERIES
    for start in range(begin, queries, QUERIES):
        query = start + tl.arange(0, QUERIES)
        block = _rows(q, query, q_row, q_column, width, queries, WIDTH)
        # Keys along the first axis: the sum over queries then stays within a warp.
        scores = tl.dot(own, tl.trans(block), input_precision="ieee") * factor
        row_lse = tl.load(lse + query, mask=query < queries, other=-float("inf"))
        # A query that sees nothing, or beyond the last one: 2^(score - inf) = 0.
        share = tl.exp2(scores - tl.where(row_lse == -float("inf"), float("inf"), row_lse)[None, :])
        if MASK == 2:
            seen = (key[:, None] < keys) & (query[None, :] < queries)
            where = visible + query[None, :].to(tl.int64) * v_query + key[:, None].to(tl.int64) * v_key
            share = tl.where(tl.load(where, mask=seen, other=0) != 0, share, 0.0)
        if CAUSAL:
            share = tl.where(key[:, None] <= query[None, :] + (keys - queries), share, 0.0)
        for klass in tl.static_range(CLASSES):
            weight = tl.load(weights + klass * w_class + query * w_query, mask=query < queries, other=0.0)
            part = tl.sum(share * weight[None, :], 1)
            sums += tl.where(label[None, :] == klass, part[:, None], 0.0)
    if MASK == 1:  # the same for every query: hidden keys receive nothing
        seen_keys = tl.load(visible + key.to(tl.int64) * v_key, mask=key < keys, other=0) != 0
        sums = tl.where(seen_keys[:, None], sums, 0.0)
    # received: [batch, klass, head, key], contiguous
    where = ((row * CLASSES + label[None, :]) * heads + head) * keys + key[:, None]
    tl.store(received + where, sums, mask=(label[None, :] < CLASSES) & (key[:, None] < keys))


def blocks(width: int, dtype: torch.dtype, mask: int, statistics: bool = False) -> dict[str, int]:
    """Block sizes for a head width: `own` rows a program keeps, `other` rows at a time that it walks along.

    Chosen from the output of ptxas for compute capability 8.0 and 9.0: at most 112 KiB of shared memory and no
    spilled registers (float32 products without TF32 run outside the tensor cores and need small blocks; with
    statistics of queries, 48 bytes are spilled in one of 24 cases, heads of width 128 in float32).
    """
    padded = max(16, triton.next_power_of_2(width))
    full = mask == FULL_MASK
    own, other = (64 if full or padded > 128 else 128), (32 if padded > (64 if full else 128) else 64)
    if statistics:
        own = min(own, 64)
    if dtype == torch.float32:
        own, other = 32, 16 if statistics else 32
    stages = 2 if padded <= 128 and dtype != torch.float32 else 1
    return {"WIDTH": padded, "own": own, "other": other, "num_warps": 4, "num_stages": stages}


def _mask(visible: Tensor | None, q: Tensor, keys: int) -> tuple[Tensor, tuple[int, ...], int]:
    """Bytes of the mask, its strides (0 along broadcast axes) and its kind."""
    if visible is None:
        return q, (0, 0, 0, 0), NO_MASK
    full = visible.to(q.device).expand(*q.shape[:3], keys)
    kind = KEY_MASK if full.stride(2) == 0 or q.shape[2] == 1 else FULL_MASK
    return full.view(torch.uint8), full.stride(), kind


def _launch(kernel: Any, count: int, width: int, q: Tensor, arguments: list[Any], **constants: Any) -> None:
    sizes = blocks(width, q.dtype, constants["MASK"], constants.get("STATS", False))
    own, other = sizes.pop("own"), sizes.pop("other")
    names = ("QUERIES", "KEYS") if kernel is _query_kernel else ("KEYS", "QUERIES")
    grid = (triton.cdiv(count, own), q.shape[0] * q.shape[1])
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[grid](*arguments, **{names[0]: own, names[1]: other}, **sizes, **constants)


@dataclass(frozen=True)
class _Scores:
    """What the scores of a layer follow from; arguments as in `received_sums`."""

    q: Tensor
    k: Tensor
    scale: float
    visible: Tensor | None
    causal: bool

    def lse2(self) -> Float[Tensor, "batch head query"]:
        """The base-2 log-sum-exp of every query."""
        return self._by_query(None, 0, 0)

    def statistics(self, first: int, canvas: int) -> tuple[Tensor, Float[Tensor, "stat batch head query"]]:
        """The base-2 log-sum-exp and the statistics of every query; `first` is the first query's own position."""
        stats = self.q.new_zeros(4, *self.q.shape[:3], dtype=torch.float32)
        return self._by_query(stats, first, canvas), stats

    def _by_query(self, stats: Tensor | None, first: int, canvas: int) -> Tensor:
        q, k = self.q, self.k
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        mask, strides, kind = _mask(self.visible, q, k.shape[2])
        tensors = [q, k, mask, lse, lse if stats is None else stats]
        arguments = [*tensors, *q.stride(), *k.stride(), *strides, *self._sizes(), first, canvas]
        if lse.numel():
            options = {"MASK": kind, "CAUSAL": self.causal, "STATS": stats is not None}
            _launch(_query_kernel, q.shape[2], q.shape[3], q, arguments, **options)
        return lse

    def sums(
        self, weights: Float[Tensor, "#batch klass query"], lse2: Float[Tensor, "batch head query"]
    ) -> Float[Tensor, "batch klass head key"]:
        """The column sums of every class of queries."""
        q, k = self.q, self.k
        classes, keys = weights.shape[1], k.shape[2]
        received = q.new_zeros(q.shape[0], classes, q.shape[1], keys, dtype=torch.float32)
        mask, strides, kind = _mask(self.visible, q, keys)
        weights = weights.to(q.device).expand(q.shape[0], -1, -1)
        tensors = [q, k, mask, lse2.contiguous(), weights, received]
        arguments = [*tensors, *q.stride(), *k.stride(), *strides, *weights.stride(), *self._sizes()]
        if received.numel():
            block = triton.next_power_of_2(classes)
            options = {"MASK": kind, "CAUSAL": self.causal, "CLASSES": classes, "CLASS_BLOCK": block}
            _launch(_received_kernel, keys, q.shape[3], q, arguments, **options)
        return received

    def _sizes(self) -> list[Any]:
        heads, queries, width = self.q.shape[1:]
        return [heads, heads // self.k.shape[1], queries, self.k.shape[2], width, self.scale * LOG2E]


def triton_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    causal: bool,
) -> Float[Tensor, "batch head query"]:
    """`attention_lse` in one kernel."""
    return _Scores(q, k, scale, visible, causal).lse2() / LOG2E


def triton_received_sums(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    weights: Float[Tensor, "#batch klass query"],
    causal: bool,
    lse: Float[Tensor, "batch head query"] | None = None,
) -> Float[Tensor, "batch klass head key"]:
    """`received_sums` in one kernel, after one for the log-sum-exp where none is given."""
    scores = _Scores(q, k, scale, visible, causal)
    return scores.sums(weights, scores.lse2() if lse is None else lse.float() * LOG2E)


def triton_pattern_stats(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    weights: Float[Tensor, "#batch klass query"] | None,
    causal: bool,
    first: int,
    canvas: int,
) -> tuple[Float[Tensor, "batch klass head key"] | None, Float[Tensor, "stat batch head query"]]:
    """The sums and the four statistics of `pattern_stats`, of every query, in a kernel each.

    The first query is at position `first` of the keys, the others follow it; the first `canvas` keys are canvas
    positions. Without weights there are no sums. Everything else is as for `received_sums`.
    """
    scores = _Scores(q, k, scale, visible, causal)
    lse2, stats = scores.statistics(first, canvas)
    return None if weights is None else scores.sums(weights, lse2), stats
