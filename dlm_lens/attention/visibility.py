"""Which query sees which key: in a canvas (`visible_keys`), and in the present forward pass (`AttentionPass`)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
