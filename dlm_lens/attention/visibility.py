"""Which query sees which key, as the denominator of every relative statistic."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def visible_keys(
    attention_mask: Bool[Tensor, "*batch position"] | Int[Tensor, "*batch position"],
    *,
    causal: bool = False,
    window: int | None = None,
) -> Bool[Tensor, "*batch 1 query key"]:
    """Visibility M of a forward pass: M_ij says that query i sees key j.

    `attention_mask` is 1 for content and 0 for padding; padding is visible to nobody. With `causal` a query
    sees itself and what stands before it, with a sliding `window` w the keys i - w + 1, ..., i alone, where
    positions count padding, as in transformers. The head axis has size 1, to broadcast against patterns.

    Raises:
        ValueError: a window below 1, or one without `causal`.
    """
    keep = attention_mask.bool()
    positions = keep.shape[-1]
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"visible_keys(window={window}, causal={causal}): a window is at least 1, and causal")
    visible = keep[..., None, None, :].expand(*keep.shape[:-1], 1, positions, positions)
    if causal:
        before = torch.ones(positions, positions, dtype=torch.bool, device=keep.device).tril()
        visible = visible & (before if window is None else before.triu(1 - window))
    return visible
