"""Which query sees which key: on a canvas, in the present pass, and where it depends on what is masked (WeDLM)."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.block_layout import BlockLayout
from dlm_lens.attention.left_padding import padding_before
from dlm_lens.attention.softmax_variants import softmax


def visible_keys(
    attention_mask: Bool[Tensor, "*batch position"] | Int[Tensor, "*batch position"],
    *,
    causal: bool = False,
    window: int | None = None,
) -> Bool[Tensor, "*batch 1 query key"]:
    """Visibility M of a forward pass: M_ij is True where query i sees key j.

    `attention_mask` is 1 for content and 0 for padding; padding is visible to no query. With `causal` a query
    sees itself and earlier keys, with a sliding `window` w the keys i - w + 1, ..., i alone, where
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


def additive_mask(visible: Bool[Tensor, "*axes"], dtype: torch.dtype) -> Float[Tensor, "*axes"]:
    """The mask that is added to scores, 0 where a key is seen, which every attention function takes."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


class AttentionPass:
    """One pass through an attention module whose scores and pattern exist: visibility and spare softmax entry.

    Attention sets it on its points (`attention_pass`) while they run. In a pattern alone a hidden key looks like
    one whose attention is 0 by rounding, so hooks record here what they hide after the softmax.

    Args:
        mask: which query sees which key before any hook; None if every query sees every key.
        spare_logits: b of every head's spare softmax entry, exp(b) in the denominator; None for none.
        query_start: position of the first query among the keys; None if the queries are the last positions.
    """

    def __init__(
        self,
        mask: Bool[Tensor, "#batch #head #query key"] | None = None,
        spare_logits: Float[Tensor, "head"] | None = None,
        query_start: int | None = None,
    ) -> None:
        self.mask, self.spare_logits, self.query_start = mask, spare_logits, query_start
        self.scores: Float[Tensor, "batch head query key"] | None = None
        self._visible: Bool[Tensor, "batch head query key"] | None = None

    def softmax(
        self, scores: Float[Tensor, "batch head query key"], rows: Int[Tensor, "row"] | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """The pattern in float32, exp(scores) / (exp(b) + sum exp(scores)); a query that sees no key has zeros."""
        pattern = softmax(scores, self.spare_logits, torch.float32)
        if self.mask is None:
            return pattern
        # Filled, not multiplied: float64's minimum is -inf in float32, and a row of those has no softmax.
        return pattern.masked_fill(~_of_rows(self.mask, rows).any(-1, keepdim=True), 0.0)

    def visible(self, rows: Int[Tensor, "row"] | None = None) -> Bool[Tensor, "row head query key"]:
        """Visibility after the softmax: that of the scores, without the entries that hooks have hidden since.

        Args:
            rows: these rows of the batch; None for all.
        """
        return _of_rows(self._present(), rows)

    def hide(self, entries: Bool[Tensor, "row head query key"], rows: Int[Tensor, "row"] | None = None) -> None:
        """Record entries that a hook hid after the softmax, in all rows of the batch or in some."""
        left = self.visible(rows) & ~entries
        self._visible = left if rows is None else self._present().index_copy(0, rows, left)

    def seen_by_any(self, rows: Int[Tensor, "row"] | None = None) -> Bool[Tensor, "#row key"] | None:
        """Keys that a query sees before any hook, which padding is not; None if all are seen."""
        return None if self.mask is None else _of_rows(self.mask, rows).any((1, 2))

    def _present(self) -> Bool[Tensor, "batch head query key"]:
        if self._visible is None:
            assert self.scores is not None
            self._visible = visible_in(self.scores)
        return self._visible


def visible_in(scores: Float[Tensor, "batch head query key"]) -> Bool[Tensor, "batch head query key"]:
    """Visibility in masked scores: hidden entries hold the dtype's minimum, or less."""
    return scores > torch.finfo(scores.dtype).min / 2


def _of_rows(tensor: Tensor, rows: Int[Tensor, "row"] | None) -> Tensor:
    return tensor if rows is None or len(tensor) == 1 else tensor[rows.to(tensor.device)]


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
