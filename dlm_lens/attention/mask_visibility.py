"""Causal attention that depends on which positions are masked (WeDLM, SDLM, I-DLM): which query sees which key."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention.block_layout import BlockLayout
from dlm_lens.attention.left_padding import padding_before


def window_start(
    content: Bool[Tensor, "*run position"], masked: Bool[Tensor, "*run position"]
) -> Int[Tensor, "*run 1"]:
    """The position before each row's first mask, with which its window begins; without masks the last position."""
    positions = masked.shape[-1]
    where = torch.arange(positions, device=masked.device)
    return torch.where(masked & content, where, positions).amin(-1, keepdim=True) - 1


def in_window(
    content: Bool[Tensor, "*run position"], masked: Bool[Tensor, "*run position"], length: int
) -> Bool[Tensor, "*run position"]:
    """The positions of each row's window: `length` from its start on, fewer at the canvas's end."""
    start, where = window_start(content, masked), torch.arange(masked.shape[-1], device=masked.device)
    return (where >= start) & (where < start + length) & content


def until_window(
    content: Bool[Tensor, "*run position"], masked: Bool[Tensor, "*run position"], length: int
) -> Bool[Tensor, "*run position"]:
    """The content up to the end of each row's window, on which its predictions depend."""
    where = torch.arange(masked.shape[-1], device=masked.device)
    return content & (where < window_start(content, masked) + length)


def sees_window(
    content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], length: int
) -> Bool[Tensor, "batch 1 query key"]:
    """Which query of a left-padded batch sees which key: those up to itself, and in the window all of the window.

    So attends SDLM where it generates (OpenGVLab/SDLM, attn_mask_utils.py,
    update_causal_mask_for_one_gen_window_2d): there the last token is in the window a second time, and the window
    does not see the first, causal one. Queries of padding see the content, so that their states are finite.

    Args:
        content: False at padding.
        masked: which positions hold [MASK].
        length: positions of the window.
    """
    where = torch.arange(masked.shape[-1], device=masked.device)
    number = torch.where(in_window(content, masked, length), window_start(content, masked), where)
    seen = (number[:, None, :] <= number[:, :, None]) | ~content[:, :, None]
    return (seen & content[:, None, :])[:, None]


def window_layout(content: Bool[Tensor, "batch position"], length: int) -> BlockLayout:
    """The layout by which statistics count: each position outside the window is a block, and so is the window."""
    return BlockLayout(length, padding_before(content), "window")


def mask_window_of(config: Any) -> int | None:
    """The length of the window in every forward pass of a network, by its config's `mask_window`; None for none."""
    length = getattr(config, "mask_window", None)
    return None if length is None else int(length)


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
