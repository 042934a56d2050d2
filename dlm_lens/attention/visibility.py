"""Which query sees which key, as the denominator of every relative statistic."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def visible_keys(
    attention_mask: Bool[Tensor, "*batch position"] | Int[Tensor, "*batch position"], *, causal: bool = False
) -> Bool[Tensor, "*batch 1 query key"]:
    """Visibility M of a forward pass: M_ij says that query i sees key j.

    `attention_mask` is 1 for content and 0 for padding; padding is visible to nobody. With `causal` a query
    sees itself and what stands before it. The head axis has size 1, to broadcast against patterns.
    """
    keep = attention_mask.bool()
    positions = keep.shape[-1]
    visible = keep[..., None, None, :].expand(*keep.shape[:-1], 1, positions, positions)
    if causal:
        visible = visible & torch.ones(positions, positions, dtype=torch.bool, device=keep.device).tril()
    return visible
