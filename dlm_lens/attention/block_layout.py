"""`BlockLayout`: where the blocks of block causal attention begin in every row of a batch."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention.left_padding import padding_before

Context = Literal["blocks", "whole", "causal", "window", "clean"]


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of block causal attention: position i of row r is in block floor((i - first_r) / length).

    Blocks counted from the answer begin at the same positions in every row. Counted from the text they begin
    elsewhere in each row of a left-padded batch; a step then has a span that holds the block of every row: its
    blocks begin in the first `length` positions of the span.

    Args:
        length: positions of a block; the first and the last block of a row may be shorter.
        first: a position of every row at which a block begins.
        context: how positions before the block that is decoded attend. "blocks": those before `first` are cut into
            blocks too. "whole": those before `first` are one block, however many (Efficient-DLM). "causal": each is
            a block of its own (Nemotron-Labs-Diffusion), and the block that is decoded holds the last of the
            positions given. "window": likewise, with a block whose place the masks of every step say (SDLM), so
            that `bounds` alone is defined. "clean": all that is before the block that is decoded is one block, and
            all from its beginning on another (GIDD); `visible` is not defined.
    """

    length: int
    first: Int[Tensor, "batch"]
    context: Context = "blocks"

    def numbers(self, positions: int) -> Int[Tensor, "batch position"]:
        """The block of every position, counted from `first`, before which it is negative.

        In a causal context a position's number is itself, and in the block that is decoded that of its first one.
        """
        where = torch.arange(positions, device=self.first.device)
        blocks = (where - self.first[:, None]).div(self.length, rounding_mode="floor")
        if self.context != "causal":
            return blocks.clamp(min=-1) if self.context == "whole" else blocks
        return where.minimum(blocks[:, -1:] * self.length + self.first[:, None])

    def visible(self, content: Bool[Tensor, "batch position"], start: int = 0) -> Bool[Tensor, "batch 1 query key"]:
        """Which query sees which key: content of its own and earlier blocks; padding neither sees nor is seen.

        Args:
            content: False at padding.
            start: the first query.
        """
        block = self.numbers(content.shape[1])
        earlier = block[:, None, :] <= block[:, start:, None]
        return (earlier & content[:, None, :] & content[:, start:, None])[:, None]

    def bounds(
        self, inside: Bool[Tensor, "*step batch position"]
    ) -> tuple[Int[Tensor, "*step batch position"], Int[Tensor, "*step batch position"]]:
        """First and last canvas position of every position's block.

        Args:
            inside: the positions of every row's block at a step; `inside`.
        """
        positions = inside.shape[-1]
        if self.context == "clean":
            where = torch.arange(positions, device=inside.device).expand(inside.shape)
            start = torch.where(inside, where, positions).amin(-1, keepdim=True)
            before = where < start
            last = where.new_full((), positions - 1)
            return torch.where(before, 0, start), torch.where(before, start - 1, last)
        if self.context in ("causal", "window"):
            where = torch.arange(positions, device=inside.device).expand(inside.shape)
            first, last = where.masked_fill(~inside, positions), where.masked_fill(~inside, -1)
            start, stop = first.amin(-1, keepdim=True), last.amax(-1, keepdim=True)
            return torch.where(inside, start, where), torch.where(inside, stop, where)
        start = self.numbers(positions) * self.length + self.first[:, None]
        stop = start + self.length - 1
        if self.context == "whole":
            start = start.masked_fill(start < self.first[:, None], 0)
        found = start.clamp(min=0), stop.clamp(max=positions - 1)
        return found[0].expand(inside.shape), found[1].expand(inside.shape)

    def spans(self, answer: int, positions: int) -> list[tuple[int, int]]:
        """The span of every block of a run, from the block that holds position `answer` on, over all rows.

        A row whose text begins after `answer` begins with its first block.
        """
        starts, found = self.starts((max(answer - self.length + 1, 0), answer)), list[tuple[int, int]]()
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
        start = self.starts(span)[:, None]
        return (start <= torch.arange(positions, device=self.first.device)) & self.until(span, positions)

    def until(self, span: tuple[int, int], positions: int) -> Bool[Tensor, "batch position"]:
        """The positions up to the end of every row's block at a step, which may see a part of it."""
        stop = (self.starts(span)[:, None] + self.length).clamp(max=span[1])
        return torch.arange(positions, device=self.first.device) < stop

    def until_block_of(self, position: int, positions: int) -> Bool[Tensor, "batch position"]:
        """The positions up to the end of every row's block that holds `position`."""
        return self.until((position + 1 - self.length, positions), positions)

    def repeated(self, halves: int) -> "BlockLayout":
        """The same for a batch that repeats these rows (guidance)."""
        return replace(self, first=self.first.repeat(halves))

    def to(self, device: torch.device) -> "BlockLayout":
        """The same on a device."""
        return replace(self, first=self.first.to(device))


def own_blocks(config: Any, content: Bool[Tensor, "batch position"]) -> BlockLayout | None:
    """The blocks of a network that attends block by block in every forward pass, counted from the text; else None.

    Its config has a `block_causal_length`. Other networks attend so only where a sampler gives them the mask.
    """
    length = getattr(config, "block_causal_length", None)
    return None if length is None else BlockLayout(length, padding_before(content))


def has_causal_context(config: Any) -> bool:
    """Whether a network is trained with a causal attention to clean text, and one both ways in noisy blocks.

    How a run attends is its sampler's `context`, which may be another.
    """
    return bool(getattr(config, "causal_context", False))
