"""Causal attention with a window of masks that sees itself in both directions (SDLM): who sees whom."""

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
