"""`AttentionInputs`: the inputs of one attention module in one forward pass."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.column_masking import ColumnMask


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of one attention module in one forward pass, as readers at `hook_z` receive them.

    Args:
        layer: index of the layer.
        q: queries after rotation; without the rows of learned sink tokens.
        k: keys after rotation, in the network's order of positions, sink tokens among them.
        v: values.
        scale: scores are q k^T scale.
        visible: which query sees which key, hidden columns left out; None for all. The query axis may have size 1.
        causal: a query sees no key after its own position, in addition to `visible`.
        dropped: columns that are hidden after the softmax.
        own_start: position of the first query among the keys; None if the queries are the last positions.
        pattern: the pattern that mixed the values, edits included, where it was materialised.
        z: the output of attention before its projection, with the edits of hooks at `hook_z`, where it is known.
        lse: log-sum-exp of every query's visible scores, and of its spare entry, where the fused kernel returned
            it; 0 for a query that sees nothing.
        spare: b of every head's spare softmax entry, exp(b) in the denominator of its rows, which sum to less than
            1; None for none.
        window: the smallest sliding window that the layer may have, which `visible` includes; None if it has none.
    """

    layer: int
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    scale: float
    visible: Bool[Tensor, "batch #head #query key"] | None = None
    causal: bool = False
    own_start: int | None = None
    dropped: ColumnMask | None = None
    pattern: Float[Tensor, "batch head query key"] | None = None
    z: Float[Tensor, "batch query head d_head"] | None = None
    lse: Float[Tensor, "batch head query"] | None = None
    window: int | None = None
    spare: Float[Tensor, "head"] | None = None

    @property
    def first(self) -> int:
        """The first query's own position among the keys, without asking the device."""
        return self.k.shape[2] - self.q.shape[2] if self.own_start is None else self.own_start

    @property
    def own(self) -> Int[Tensor, "query"]:
        """Each query's own position among the keys; without `own_start` the queries are the last positions."""
        return torch.arange(self.first, self.first + self.q.shape[2], device=self.q.device)

    def seen(self, rows: slice | Tensor = slice(None)) -> Bool[Tensor, "#batch #head query key"] | None:
        """Which keys the queries `rows` see, causality included; None where every query sees every key."""
        visible = self.visible
        if visible is not None and visible.shape[-2] > 1:
            visible = visible[:, :, rows]
        if not self.causal:
            return visible
        before = torch.arange(self.k.shape[2], device=self.q.device) <= self.own[rows, None]
        return before[None, None] if visible is None else visible & before
