"""`BlockLayout`: where the blocks of block causal attention are in each row; `RunningBlocks`: those in work."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

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
