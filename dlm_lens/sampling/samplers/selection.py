"""`Select`: which eligible positions a step unmasks, the most confident ones first."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


def by_confidence(
    confidence: Float[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"]
) -> Int[Tensor, "batch position"]:
    """The positions of every row in the order of falling confidence; of equals the earlier, eligible ones first."""
    order = confidence.argsort(dim=-1, descending=True, stable=True)
    # Eligible positions first, whatever their confidence: -inf among them must not tie with the others.
    first = eligible.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, first)


class Select(nn.Module):
    """Choose the `count` most confident eligible positions of every row; of equals, the earlier one.

    Attributes:
        by_topk: let `torch.topk` choose among equals, as the authors' code does. Which ones it takes depends on the
            number of positions that it is given and how many it returns, on the device and on the version of torch.
        ranks_all: let it return all eligible positions, of which the first `count` are chosen, as code does that
            compares each with a threshold afterwards.
        span: of the positions that `torch.topk` is given; None for all.
        padding: of every row; its positions are given to `torch.topk` after the others, as by code that pads on the
            right. None where they come first.
    """

    by_topk = False
    ranks_all = False
    span: tuple[int, int] | None = None
    padding: Int[Tensor, "batch"] | None = None

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        if self.by_topk:
            return self._of_topk(confidence.masked_fill(~eligible, -torch.inf), count) & eligible
        order = by_confidence(confidence, eligible)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
        )
        return (rank < count[:, None]) & eligible

    def _of_topk(
        self, confidence: Float[Tensor, "batch position"], count: Int[Tensor, "batch"]
    ) -> Bool[Tensor, "batch position"]:
        """The positions that `torch.topk` chooses in every row; the confidence is -inf where none may be."""
        chosen = torch.zeros_like(confidence, dtype=torch.bool)
        start, stop = self.span or (0, confidence.shape[1])
        before = [0] * len(count) if self.padding is None else self.padding.tolist()
        for row, (number, moved) in enumerate(zip(count.tolist(), before, strict=True)):
            given = confidence[row].roll(-moved)[start:stop]
            ranked = int((given > -torch.inf).sum()) if self.ranks_all else min(number, len(given))
            best = given.topk(ranked).indices[:number]
            chosen[row, (best + start + moved) % confidence.shape[1]] = True
        return chosen
