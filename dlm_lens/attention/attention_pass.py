"""`AttentionPass`: what attention knows of the pass at hand, for hooks that are given its scores or its pattern."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class AttentionPass:
    """One pass through an attention module whose scores and pattern exist: who sees whom, and the spare entry.

    Attention leaves it at its points (`attention_pass`) while they run. A pattern alone does not tell a hidden key
    from one whose attention is 0 by rounding, so hooks note here what they hide after the softmax.

    Args:
        mask: which query sees which key before any hook; None if every query sees every key.
        spare_logits: b of every head's spare softmax entry, exp(b) in the denominator; None for none.
    """

    def __init__(
        self,
        mask: Bool[Tensor, "#batch #head #query key"] | None = None,
        spare_logits: Float[Tensor, "head"] | None = None,
    ) -> None:
        self.mask, self.spare_logits = mask, spare_logits
        self.scores: Float[Tensor, "batch head query key"] | None = None
        self._visible: Bool[Tensor, "batch head query key"] | None = None

    def softmax(
        self, scores: Float[Tensor, "batch head query key"], rows: Int[Tensor, "row"] | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """The pattern in float32, exp(scores) / (exp(b) + sum exp(scores)); a query that sees no key has zeros."""
        if self.spare_logits is None:
            pattern = scores.softmax(-1, dtype=torch.float32)
        else:
            spare = self.spare_logits.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            pattern = torch.cat([scores, spare], -1).softmax(-1, dtype=torch.float32)[..., :-1]
        if self.mask is None:
            return pattern
        # Filled, not multiplied: float64's minimum is -inf in float32, and a row of those has no softmax.
        return pattern.masked_fill(~_of_rows(self.mask, rows).any(-1, keepdim=True), 0.0)

    def visible(self, rows: Int[Tensor, "row"] | None = None) -> Bool[Tensor, "row head query key"]:
        """Who sees whom after the softmax: what the scores left, without what hooks have hidden since.

        Args:
            rows: these rows of the batch; None for all.
        """
        return _of_rows(self._known(), rows)

    def hide(self, entries: Bool[Tensor, "row head query key"], rows: Int[Tensor, "row"] | None = None) -> None:
        """Note what a hook hid after the softmax, in all rows of the batch or in some."""
        left = self.visible(rows) & ~entries
        self._visible = left if rows is None else self._known().index_copy(0, rows, left)

    def seen_by_any(self, rows: Int[Tensor, "row"] | None = None) -> Bool[Tensor, "#row key"] | None:
        """Keys that a query sees before any hook, which padding is not; None if all are seen."""
        return None if self.mask is None else _of_rows(self.mask, rows).any((1, 2))

    def _known(self) -> Bool[Tensor, "batch head query key"]:
        if self._visible is None:
            assert self.scores is not None
            self._visible = visible_in(self.scores)
        return self._visible


def visible_in(scores: Float[Tensor, "batch head query key"]) -> Bool[Tensor, "batch head query key"]:
    """Who sees whom in masked scores: hidden entries hold the dtype's minimum, or less."""
    return scores > torch.finfo(scores.dtype).min / 2


def _of_rows(tensor: Tensor, rows: Int[Tensor, "row"] | None) -> Tensor:
    return tensor if rows is None or len(tensor) == 1 else tensor[rows.to(tensor.device)]
