"""Triton kernels of `received_sums` and `attention_lse`; imported only where they run.

Two passes over q k^T. The first takes the log-sum-exp of every query, the second sums 2^(score - lse) per key and
class of queries. Each program owns a block of keys (or of queries) and walks along the other axis, so that nothing
is summed by atomics: the same inputs give the same bits. Products take the inputs' dtype (float32 without TF32)
and are accumulated in float32, as is everything computed from them.
"""

import math
from contextlib import nullcontext
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
    return tl.load(base + index[:, None] * stride_row + column[None, :] * stride_column, mask=inside, other=0.0)


@triton.jit
def _lse_kernel(
    q, k, visible, lse,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_query, v_key,
    heads, groups, queries, keys, width, factor,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp of the visible scores of a block of queries; -inf where nothing is visible."""
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    own = _rows(q + row * q_batch + head * q_head, query, q_row, q_column, width, queries, WIDTH)
    k += row * k_batch + (head // groups) * k_head
    visible += row * v_batch + head * v_head
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(0, (tl.program_id(0) + 1) * QUERIES + keys - queries))
    for start in range(0, end, KEYS):
        key = start + tl.arange(0, KEYS)
        block = _rows(k, key, k_row, k_column, width, keys, WIDTH)
        scores = tl.dot(own, tl.trans(block), input_precision="ieee") * factor
        seen = (query[:, None] < queries) & (key[None, :] < keys)
        if MASK == 1:
            seen &= (tl.load(visible + key * v_key, mask=key < keys, other=0) != 0)[None, :]
        if MASK == 2:
            where = visible + query[:, None].to(tl.int64) * v_query + key[None, :] * v_key
            seen &= tl.load(where, mask=seen, other=0) != 0
        if CAUSAL:
            seen &= key[None, :] <= query[:, None] + (keys - queries)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        # While a query has seen nothing its maximum is -inf, and -inf + inf is not a number.
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        top = new
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
            where = visible + query[None, :].to(tl.int64) * v_query + key[:, None] * v_key
            share = tl.where(tl.load(where, mask=seen, other=0) != 0, share, 0.0)
        if CAUSAL:
            share = tl.where(key[:, None] <= query[None, :] + (keys - queries), share, 0.0)
        for klass in tl.static_range(CLASSES):
            weight = tl.load(weights + klass * w_class + query * w_query, mask=query < queries, other=0.0)
            part = tl.sum(share * weight[None, :], 1)
            sums += tl.where(label[None, :] == klass, part[:, None], 0.0)
    if MASK == 1:  # the same for every query: hidden keys receive nothing
        seen_keys = tl.load(visible + key * v_key, mask=key < keys, other=0) != 0
        sums = tl.where(seen_keys[:, None], sums, 0.0)
    # received: [batch, klass, head, key], contiguous
    where = ((row * CLASSES + label[None, :]) * heads + head) * keys + key[:, None]
    tl.store(received + where, sums, mask=(label[None, :] < CLASSES) & (key[:, None] < keys))


def blocks(width: int, dtype: torch.dtype, mask: int) -> dict[str, int]:
    """Block sizes for a head width: `own` rows a program keeps, `other` rows at a time that it walks along.

    Chosen from the output of ptxas for compute capability 8.0 and 9.0: at most 112 KiB of shared memory and no
    spilled registers (float32 products without TF32 run outside the tensor cores and need small blocks).
    """
    padded = max(16, triton.next_power_of_2(width))
    full = mask == FULL_MASK
    own, other = (64 if full or padded > 128 else 128), (32 if padded > (64 if full else 128) else 64)
    if dtype == torch.float32:
        own, other = 32, 32
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
    sizes = blocks(width, q.dtype, constants["MASK"])
    own, other = sizes.pop("own"), sizes.pop("other")
    names = ("QUERIES", "KEYS") if kernel is _lse_kernel else ("KEYS", "QUERIES")
    grid = (triton.cdiv(count, own), q.shape[0] * q.shape[1])
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[grid](*arguments, **{names[0]: own, names[1]: other}, **sizes, **constants)


def _lse2(q: Tensor, k: Tensor, scale: float, visible: Tensor | None, causal: bool) -> Tensor:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    mask, strides, kind = _mask(visible, q, k.shape[2])
    sizes = [q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], scale * LOG2E]
    arguments = [q, k, mask, lse, *q.stride(), *k.stride(), *strides, *sizes]
    if lse.numel():
        _launch(_lse_kernel, q.shape[2], q.shape[3], q, arguments, MASK=kind, CAUSAL=causal)
    return lse


def triton_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    causal: bool,
) -> Float[Tensor, "batch head query"]:
    """`attention_lse` in one kernel."""
    return _lse2(q, k, scale, visible, causal) / LOG2E


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
    classes, keys = weights.shape[1], k.shape[2]
    received = q.new_zeros(q.shape[0], classes, q.shape[1], keys, dtype=torch.float32)
    row_lse = _lse2(q, k, scale, visible, causal) if lse is None else (lse.float() * LOG2E).contiguous()
    mask, strides, kind = _mask(visible, q, keys)
    weights = weights.to(q.device).expand(q.shape[0], -1, -1)
    sizes = [q.shape[1], q.shape[1] // k.shape[1], q.shape[2], keys, q.shape[3], scale * LOG2E]
    tensors = [q, k, mask, row_lse, weights, received]
    arguments = [*tensors, *q.stride(), *k.stride(), *strides, *weights.stride(), *sizes]
    if received.numel():
        block = triton.next_power_of_2(classes)
        options = {"MASK": kind, "CAUSAL": causal, "CLASSES": classes, "CLASS_BLOCK": block}
        _launch(_received_kernel, keys, q.shape[3], q, arguments, **options)
    return received
