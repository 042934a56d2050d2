"""Causal attention in the order "observed tokens first, then masks" (WeDLM): which query sees which key."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def observed_order(masked: Bool[Tensor, "*run position"]) -> Int[Tensor, "*run position"]:
    """The positions in their physical order: those that are not masked, then the masks, each from left to right."""
    return masked.long().argsort(dim=-1, stable=True)


def sees_observed_first(
    masked: Bool[Tensor, "*run position"],
) -> Bool[Tensor, "*run query key"]:
    """Which query comes at or after which key in `observed_order` (2512.22737, topological reordering).

    Attention in this order equals causal attention over the canvas whose masks are moved to its end, where every
    token keeps its rotary position. An observed position sees the observed ones up to itself; a mask sees all
    observed positions, and the masks up to itself.
    """
    where = torch.arange(masked.shape[-1], device=masked.device)
    earlier = where <= where[:, None]
    query, key = masked[..., :, None], masked[..., None, :]
    return torch.where(query == key, earlier, query)


def observed_first(
    content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
) -> Bool[Tensor, "batch 1 query key"]:
    """Which query of a left-padded batch sees which key.

    Queries of padding see the content, as in the other families, so that their states are finite.

    Args:
        content: False at padding, and at what the step hides.
        masked: which positions hold [MASK].
    """
    seen = sees_observed_first(masked & content) | ~content[:, :, None]
    return (seen & content[:, None, :])[:, None]


def without_later_masks(masked: Bool[Tensor, "*run position"], length: int) -> Bool[Tensor, "*run position"]:
    """All positions but the masks that are `length` or more positions after the first mask of their row."""
    where, positions = torch.arange(masked.shape[-1], device=masked.device), masked.shape[-1]
    first = torch.where(masked, where, positions).amin(-1, keepdim=True)
    return ~masked | (where < first + length)


def attends_observed_first(config: Any) -> bool:
    """Whether every forward pass of a network attends in this order, by its config's `observed_first`."""
    return bool(getattr(config, "observed_first", False))
