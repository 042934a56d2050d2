"""Received attention of one attention module from its queries and keys, without a pattern.

The statistic of 2510.15731, section 4.1, for several classes of queries in one pass. Which code runs
(`kernel_selection`): Triton kernels for CUDA tensors, tiles of torch everywhere else and under autograd.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention.kernel_selection import run_kernels
from dlm_lens.attention.tile_sums import tiled_received_sums
from dlm_lens.attention.tiled import tiled_lse


def received_sums(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    *,
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None = None,
    queries: Float[Tensor, "#batch klass query"] | Bool[Tensor, "#batch klass query"] | None = None,
    causal: bool = False,
    lse: Float[Tensor, "batch head query"] | None = None,
) -> Float[Tensor, "batch klass head key"]:
    """Attention that each key receives from each class of queries: r_cj = sum_i w_ci A_ij.

    A = softmax(scale q k^T) over the visible keys, w the weights of the query classes. One class of all
    queries gives S times the A-bar of 2510.15731, section 4.1. Accumulated and returned in float32 whatever the
    dtype of q and k. A query that sees no key contributes zeros. Memory beyond the result on a CPU: a fixed tile,
    copies of one head's queries and keys, and of one `[query, key]` of a mask that differs between queries.

    Args:
        q: rotated queries.
        k: rotated keys; query head h reads key head h // (head / kv_head).
        scale: factor of the scores, usually d_head ** -0.5.
        visible: which key each query sees; axes of size 1 are broadcast. None: every query sees every key.
        queries: weight of every query in every class (1 counts, 0 does not). None: one class, all queries.
        causal: a query sees only keys up to its own position too; with fewer queries than keys they are the
            last ones.
        lse: log-sum-exp of the visible scores of every query, where it is known (`attention_lse`, or a fused
            attention kernel that returns it); saves a pass.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(q, k, visible)
    _check_queries(q, queries)
    if lse is not None and lse.shape != q.shape[:3]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}; q of {tuple(q.shape)} needs {tuple(q.shape[:3])}")
    weights = q.new_ones(1, 1, q.shape[2], dtype=torch.float32) if queries is None else queries.float()

    def kernels() -> Tensor:
        from dlm_lens.attention.triton_kernels import triton_received_sums

        return triton_received_sums(q, k, scale, visible, weights, causal, lse)

    def tiles() -> Tensor:
        return tiled_received_sums(q, k, scale, visible, weights, causal, lse)

    return run_kernels(kernels, tiles, q, k, weights)


def attention_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    *,
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """Log-sum-exp of every query's visible scores, log sum_j exp(scale q_i k_j), in float32.

    -inf for a query that sees no key. Arguments as in `received_sums`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(q, k, visible)

    def kernels() -> Tensor:
        from dlm_lens.attention.triton_kernels import triton_lse

        return triton_lse(q, k, scale, visible, causal)

    return run_kernels(kernels, lambda: tiled_lse(q, k, scale, visible, causal), q, k)


def _check(q: Tensor, k: Tensor, visible: Tensor | None) -> None:
    shapes = f"q of {tuple(q.shape)} and k of {tuple(k.shape)}"
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{shapes} do not fit: they must be [batch, head, query, d_head] and [batch, kv_head, key, d_head]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}: the number of query heads must be a multiple of the number of key heads")
    if not (q.is_floating_point() and k.is_floating_point()):
        raise ValueError(f"q and k must be of floating point, got {q.dtype} and {k.dtype}")
    if visible is None:
        return
    if visible.dtype != torch.bool:
        raise ValueError(f"visible must be boolean (True: the query sees the key), got {visible.dtype}")
    full = (*q.shape[:3], k.shape[2])
    if visible.ndim != 4 or any(
        given not in (1, needed) for given, needed in zip(visible.shape, full, strict=True)
    ):
        raise ValueError(
            f"visible has shape {tuple(visible.shape)}; {shapes} need {full}, where any axis may be of size 1"
        )


def _check_queries(q: Tensor, queries: Tensor | None) -> None:
    if queries is None:
        return
    if queries.ndim != 3 or queries.shape[0] not in (1, q.shape[0]) or queries.shape[2] != q.shape[2]:
        raise ValueError(
            f"queries has shape {tuple(queries.shape)}; q of {tuple(q.shape)} needs weights of "
            f"[batch, klass, query] with batch {q.shape[0]} or 1 and {q.shape[2]} queries"
        )
