"""`BlockLayout`: where the blocks of block causal attention begin in every row of a batch."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention.left_padding import padding_before


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of block causal attention: position i of row r is in block floor((i - first_r) / length).

    Blocks counted from the answer begin at the same positions in every row. Counted from the text they begin
    elsewhere in each row of a left-padded batch; a step then has a span that holds the block of every row: its
    blocks begin in the first `length` positions of the span.

    Args:
        length: positions of a block; the first and the last block of a row may be shorter.
        first: a position of every row at which a block begins.
    """

    length: int
    first: Int[Tensor, "batch"]

    def numbers(self, positions: int) -> Int[Tensor, "batch position"]:
        """The block of every position; negative before `first`."""
        where = torch.arange(positions, device=self.first.device)
        return (where - self.first[:, None]).div(self.length, rounding_mode="floor")

    def visible(self, content: Bool[Tensor, "batch position"], start: int = 0) -> Bool[Tensor, "batch 1 query key"]:
        """Which query sees which key: content of its own and earlier blocks; padding neither sees nor is seen.

        Args:
            content: False at padding.
            start: the first query.
        """
        block = self.numbers(content.shape[1])
        earlier = block[:, None, :] <= block[:, start:, None]
        return (earlier & content[:, None, :] & content[:, start:, None])[:, None]

    def bounds(self, positions: int) -> tuple[Int[Tensor, "batch position"], Int[Tensor, "batch position"]]:
        """First and last canvas position of every position's block."""
        start = self.numbers(positions) * self.length + self.first[:, None]
        return start.clamp(min=0), (start + self.length - 1).clamp(max=positions - 1)

    def spans(self, answer: int, positions: int) -> list[tuple[int, int]]:
        """The span of every block of a run, from the block that holds position `answer` on, over all rows."""
        starts, found = self.starts((answer - self.length + 1, answer)), list[tuple[int, int]]()
        while bool((starts < positions).any()):
            stop = int(starts[starts < positions].max()) + self.length
            found.append((int(starts.min()), min(stop, positions)))
            starts = starts + self.length
        return found

    def starts(self, span: tuple[int, int]) -> Int[Tensor, "batch"]:
        """Where the block of every row begins at a step: its first one that begins in the span or after it."""
        return span[0] + (self.first - span[0]) % self.length

    def inside(self, span: tuple[int, int], positions: int) -> Bool[Tensor, "batch position"]:
        """The positions of every row's block at a step; none in a row whose blocks are all finished."""
        where, start = torch.arange(positions, device=self.first.device), self.starts(span)[:, None]
        return (start <= where) & (where < start + self.length)

    def until(self, span: tuple[int, int], positions: int) -> Bool[Tensor, "batch position"]:
        """The positions up to the end of every row's block at a step."""
        stop = self.starts(span)[:, None] + self.length
        return torch.arange(positions, device=self.first.device) < stop

    def repeated(self, halves: int) -> "BlockLayout":
        """The same for a batch that repeats these rows (guidance)."""
        return BlockLayout(self.length, self.first.repeat(halves))

    def to(self, device: torch.device) -> "BlockLayout":
        """The same on a device."""
        return BlockLayout(self.length, self.first.to(device))


def own_blocks(config: Any, content: Bool[Tensor, "batch position"]) -> BlockLayout | None:
    """The blocks of a network that attends block by block in every forward pass, counted from the text; else None.

    Its config has a `block_causal_length`. Other networks attend so only where a sampler gives them the mask.
    """
    length = getattr(config, "block_causal_length", None)
    return None if length is None else BlockLayout(length, padding_before(content))
