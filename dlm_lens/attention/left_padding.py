"""Rows that are padded on the left: where a row begins, its rotary positions, and which output predicts a position.

Every argument `content` is True at tokens and False at the padding on the left.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def padding_before(content: Bool[Tensor, "*batch position"]) -> Int[Tensor, "*batch"]:
    """How many positions of padding each row has before its first token; 0 for a row without any token."""
    return content.int().argmax(-1)


def position_ids(
    content: Bool[Tensor, "batch position"] | Int[Tensor, "batch position"],
) -> Int[Tensor, "batch position"]:
    """Rotary positions that count from each row's first token, so that a padded row is rotated as it is alone."""
    return (content.long().cumsum(-1) - 1).clamp(min=0)


def predicting_position(content: Bool[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
    """Which output predicts each position of a model with `logit_shift`: the one before it.

    A row's first token has no predecessor and is predicted by its own output.
    """
    index = torch.arange(content.shape[1], device=content.device).expand_as(content)
    return (index - 1).maximum(padding_before(content)[:, None])
