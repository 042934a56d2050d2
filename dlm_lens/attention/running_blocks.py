"""`RunningBlocks`: the consecutive blocks that a row decodes at once, from its open positions."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention.block_layout import BlockLayout


class BlockCounts(NamedTuple):
    """How many positions of each block of every row there are, and how many of them are open.

    The first column is what lies before the first block that the layout counts: padding, or a prompt.
    """

    number: Int[Tensor, "batch position"]
    content: Int[Tensor, "batch block"]
    open: Int[Tensor, "batch block"]

    @classmethod
    def of(
        cls, layout: BlockLayout, content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> "BlockCounts":
        """Count the positions of every block.

        Args:
            layout: where the blocks are.
            content: False where there is padding.
            masked: the open positions.
        """
        number = layout.numbers(masked.shape[-1]).clamp(min=-1) + 1
        blocks = int(number.max()) + 1 if number.numel() else 1
        none = torch.zeros(len(masked), blocks, dtype=torch.long, device=masked.device)
        counts = (none.scatter_add(1, number, each.long()) for each in (content, masked & content))
        return cls(number, *counts)

    def reached(self, share: float) -> Bool[Tensor, "batch block"]:
        """The blocks of which at least this share of the positions is decided; blocks without content too."""
        sizes = range(int(self.content.max()) + 1 if self.content.numel() else 1)
        least = torch.tensor([_least(size, share) for size in sizes], device=self.content.device)
        return self.content - self.open >= least[self.content]


@cache
def _least(size: int, share: float) -> int:
    """The fewest of so many positions that are at least this share of them, compared as Python's numbers."""
    return next(count for count in range(size + 1) if not size or count / size >= share)


@dataclass(frozen=True)
class RunningBlocks:
    """The blocks that a row decodes at a step, the *running set* of MBD-LMs (2606.29215) and of D2F (2508.09192).

    It begins with the row's first block that has an open position. The block after the running ones joins them as
    soon as the last of these is decided to a share of at least `threshold`, while they are fewer than `most`.

    Args:
        most: of the blocks that run at once.
        threshold: share of the last running block's positions, above 0 and at most 1.
        of_span: the set is the span of the step, in runs of one row where a finished block keeps its place for one
            step (a quirk of Diffulex, the authors' engine).
    """

    most: int
    threshold: float
    of_span: bool = False

    def positions(
        self,
        layout: BlockLayout,
        content: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        before: Bool[Tensor, "batch position"] | None = None,
    ) -> Bool[Tensor, "batch position"]:
        """The positions of every row's running blocks; none in a row without open positions.

        Args:
            layout: where the blocks are.
            content: False where there is padding.
            masked: the open positions of the step.
            before: those of the step before, whose first open block still has its place; None to give it free.
        """
        counts = BlockCounts.of(layout, content, masked)
        first, last = self._bounds(counts, counts)
        if before is not None:
            kept = BlockCounts.of(layout, content, before)
            held = self._bounds(counts, kept)
            numbers = torch.arange(counts.open.shape[1], device=masked.device)
            works = ((counts.open > 0) & (numbers <= held[1][:, None])).any(-1)
            # A step at which nothing could be decided only stores the finished blocks, and is left out.
            first, last = (torch.where(works, old, new) for old, new in zip(held, (first, last), strict=True))
        return content & (counts.number >= first[:, None]) & (counts.number <= last[:, None])

    def _bounds(self, counts: BlockCounts, kept: BlockCounts) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """The first and the last running block; the first is that of `kept`."""
        blocks = counts.open.shape[1]
        numbers = torch.arange(blocks, device=counts.open.device)
        begin = numbers.masked_fill(kept.open == 0, blocks).amin(-1)
        short = numbers.masked_fill(counts.reached(self.threshold), blocks).amin(-1)
        end = numbers.masked_fill(counts.content == 0, -1).amax(-1)
        return begin, torch.minimum(torch.minimum(short, begin + self.most - 1), end)
