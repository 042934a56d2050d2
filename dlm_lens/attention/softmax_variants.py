"""Softmax variants with a spare entry in every row, so that attention can go to no key.

A_ij = exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)): rows sum to less than 1. Off-by-one has b = 0 ("Attention is off by
one", Miller 2023), sink logits learn b per head (gpt-oss, 2508.10925); 2510.15731, section 8, points to both.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Softmax = Literal["standard", "off_by_one", "sink_logits"]
ADDED = 8
"""Coordinates that a spare key with a logit adds: CUDA's fused kernels for masks take no half-precision heads whose
width is no multiple of 8, and torch would form the pattern (PyTorch, sdp_utils.cpp: check_cudnn_tensor_shapes,
check_head_dim_size_mem_efficient)."""


def check_softmax(name: str, sinks: int) -> None:
    """Raise unless this is a softmax that the model can have.

    Raises:
        ValueError: an unknown softmax, or a spare entry together with learned sink tokens.
    """
    if name not in get_args(Softmax):
        raise ValueError(f"softmax is {name!r}; it must be one of {', '.join(map(repr, get_args(Softmax)))}")
    if name != "standard" and sinks:
        raise ValueError(f"softmax {name!r} and {sinks} sink tokens cannot be combined; choose one")


def spare_logits(attention: Any, device: torch.device) -> Float[Tensor, "head"] | None:
    """The b of every head of an attention module, or None for the standard softmax.

    Args:
        attention: the module.
        device: of its queries; the weights of an offloaded module are elsewhere.
    """
    config = attention.config
    name = getattr(config, "softmax", "standard")
    if name == "standard":
        return None
    if name == "sink_logits":
        logits: Tensor = attention.sink_logits
        return logits
    return torch.zeros(config.num_attention_heads, device=device)


def softmax(
    scores: Float[Tensor, "batch head query key"],
    spare: Float[Tensor, "head"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "batch head query key"]:
    """A_ij = exp(s_ij) / (exp(b_h) + sum_k exp(s_ik)), without exp(b_h) where there is no spare entry.

    Args:
        scores: s.
        spare: b.
        dtype: of the computation and the result; None for that of the scores.
    """
    if spare is None:
        return scores.softmax(-1, dtype=dtype)
    column = spare.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1, dtype=dtype)[..., :-1]


def rows_of_one(pattern: Float[Tensor, "*leading key"]) -> Float[Tensor, "*leading key"]:
    """A_ij / sum_k A_ik, at least in float32; a row of zeros stays so.

    The least divisor, 1e-30, is 0 in float16, where a row of zeros would become NaN.
    """
    wide = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
    return wide / wide.sum(-1, keepdim=True).clamp(min=1e-30)


def with_spare_key(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    mask: Tensor | None,
    logits: Float[Tensor, "head"] | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same attention for a fused kernel: a last key with the score b and a value of zero.

    With logits a coordinate is added in which queries hold b / scale and only the spare key is 1, and `ADDED` - 1
    of zeros; without, a key of zeros has the score 0 already. So no mask of [query, key] is needed.
    """
    pad = torch.nn.functional.pad
    spare = torch.zeros_like(k[:, :, :1])
    if logits is not None:
        column = (logits / scale).to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        q = torch.cat([q, pad(column, (0, ADDED - 1))], -1)
        k = pad(k, (0, ADDED))
        spare = pad(pad(spare, (0, 1), value=1.0), (0, ADDED - 1))
        # Fused kernels want one width for keys and values; the added coordinates of z are zero.
        v = pad(v, (0, ADDED))
    if mask is not None:
        visible = True if mask.dtype == torch.bool else 0.0
        mask = torch.cat([mask, torch.full_like(mask[..., :1], visible)], -1)
    return q, torch.cat([k, spare], 2), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2), mask
