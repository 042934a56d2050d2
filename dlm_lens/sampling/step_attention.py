"""`StepAttention`: what the steps of a run see of a canvas, and where their blocks are, from the run's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import (
    BlockLayout,
    RunningBlocks,
    in_window,
    padding_before,
    until_window,
    window_layout,
    without_later_masks,
)
from dlm_lens.sampling.algorithm_registry import sampler_class


@dataclass(frozen=True, eq=False)
class StepAttention:
    """How the steps of a run attend: samplers, recorders and finished runs read it alike.

    Args:
        blocks: the blocks of block causal attention in every row; None without them.
        own_blocks: the positions up to the end of each row's own last block, where rows end before the canvas
            (LLaDA2); None for all.
        window: attention is causal, but for the window of `attention.sees_window` of so many positions; None for
            none.
        ends_with_window: nothing after that window is seen, as in a run (SDLM). A forward pass sees all.
        mask_reach: open positions so many or more after their row's first are not seen (WeDLM, I-DLM); None: all.
        ends_with_span: nothing after the step's span is seen (likelihoods in blocks).
        observed_first: attention is causal in the order of `attention.observed_order`, observed tokens first.
        running: which blocks a row decodes at once; None for one.
        room: positions that are not seen while they are open, in which a sampler may insert masks (DreamOn); its
            sampler changes it at every step. None for none.
        prompt: positions that hold tokens of the prompt, where steps move these (DreamOn); likewise changed at
            every step. None where they stay.
    """

    blocks: BlockLayout | None = None
    own_blocks: Bool[Tensor, "batch position"] | None = None
    window: int | None = None
    ends_with_window: bool = False
    mask_reach: int | None = None
    ends_with_span: bool = False
    observed_first: bool = False
    running: RunningBlocks | None = None
    room: Bool[Tensor, "*step batch position"] | None = None
    prompt: Bool[Tensor, "batch position"] | None = None

    @property
    def varies(self) -> bool:
        """Whether queries of a row see different keys, by blocks or a window of masks."""
        return self.blocks is not None or self.window is not None

    def within_own_blocks(
        self, positions: Bool[Tensor, "*step batch position"]
    ) -> Bool[Tensor, "*step batch position"]:
        """Those of the positions, of a canvas or its first part, that are not after their row's own last block."""
        own = self.own_blocks
        return positions if own is None else positions & own[:, : positions.shape[-1]]

    def answer_at(
        self, answer: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Bool[Tensor, "batch position"]:
        """The positions of the answer at a step with these open positions: those of the first step, or moved.

        Room is none of them.
        """
        answer = answer if self.prompt is None else ~self.prompt.to(masked.device)
        return answer if self.room is None else answer & ~(masked & self.room.to(masked.device))

    def seen_content(
        self,
        content: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "*step batch position"],
        stop: int | Int[Tensor, "*step 1 1"],
    ) -> Bool[Tensor, "*step batch position"]:
        """The content that a step sees of a canvas with these open positions: all, or a part.

        Args:
            content: False where there is padding.
            masked: the open positions of one step or of several.
            stop: where the span of the step, or of each, ends.
        """
        content = self.within_own_blocks(content).expand(masked.shape)
        if self.room is not None:
            content = content & ~(masked & self.room[..., : masked.shape[-1]].to(masked.device))
        if self.window is not None and self.ends_with_window:
            return until_window(content, masked, self.window)
        if self.ends_with_span:
            return content & (torch.arange(masked.shape[-1], device=masked.device) < stop)
        reach = self.mask_reach
        return content if reach is None else content & without_later_masks(masked & content, reach)

    def in_block(
        self, content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], span: tuple[int, int]
    ) -> Bool[Tensor, "#batch position"]:
        """The positions of each row's block or blocks at a step: without blocks those of its span, in all rows."""
        where = torch.arange(masked.shape[-1], device=masked.device)
        in_span = ((where >= span[0]) & (where < span[1]))[None]
        if self.window is not None:
            return in_window(content, masked, self.window)
        if self.blocks is None or (self.running is not None and self.running.of_span):
            return in_span
        if self.running is None:
            return self.blocks.inside(span, masked.shape[-1])
        return (where < span[1]) & self.running.positions(self.blocks, self.within_own_blocks(content), masked)

    def until_block(
        self, content: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], span: tuple[int, int]
    ) -> Bool[Tensor, "#batch position"] | None:
        """The positions up to the end of each row's block, or blocks, at a step; None for all."""
        if self.blocks is None or self.blocks.context == "clean":
            return None
        if self.running is None:
            return self.blocks.until(span, masked.shape[-1])
        decoded = self.in_block(content, masked, span)
        # A row without an open position has no block: it sees what the step sees.
        ends = decoded.flip(-1).cumsum(-1).flip(-1) > 0
        where = torch.arange(masked.shape[-1], device=masked.device)
        return ends | (~decoded.any(-1, keepdim=True) & (where < span[1]))

    def counted_blocks(self, content: Bool[Tensor, "batch position"]) -> BlockLayout | None:
        """The layout by which statistics count: the blocks, or that of a window of masks."""
        return self.blocks if self.window is None else window_layout(content, self.window)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        blocks, own = self.blocks, self.own_blocks
        return replace(
            self,
            blocks=None if blocks is None else blocks.to(device),
            own_blocks=None if own is None else own.to(device),
        )


def attention_of(
    settings: Mapping[str, Any],
    content: Bool[Tensor, "batch position"],
    prompt_length: int,
    *,
    beside_encoder: bool = False,
) -> StepAttention:
    """How the steps of a run with these settings attend.

    Forward passes and likelihoods, which no sampler made, name what their network does in settings of their own
    (`settings_of_pass`), or the sampler whose blocks they have (`blocks_of`).

    Args:
        settings: of the run.
        content: False where there is padding.
        prompt_length: positions before the answer.
        beside_encoder: the block of forward passes is the canvas beside an encoder, which begins with the answer.
    """
    blocks: BlockLayout | None = None
    if (length := settings.get("block_causal_length")) is not None:
        first = padding_before(content)
        blocks = BlockLayout(int(length), torch.full_like(first, prompt_length) if beside_encoder else first)
    elif (decodes := settings.get("blocks_of")) is not None:
        decoding = sampler_class({"sampler": decodes})
        found = decoding.block_layout_of(int(settings["block_length"]), content, prompt_length)
        blocks = found if decoding.grows else None
    window, observed_first = settings.get("mask_window"), bool(settings.get("observed_first"))
    if blocks is None and window is None and not observed_first:
        return sampler_class(settings).attention_of(settings, content, prompt_length)
    return StepAttention(
        blocks=blocks,
        window=None if window is None else int(window),
        observed_first=observed_first,
        ends_with_span=bool(settings.get("sees_span")),
    )
