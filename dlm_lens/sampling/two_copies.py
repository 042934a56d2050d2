"""One pass over [x_t, x_0], by which block diffusion trains: every noisy block sees the clean blocks before it."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.attention import BlockLayout, padding_before, position_ids
from dlm_lens.sampling.algorithm_registry import algorithms
from dlm_lens.sampling.network import CanvasLogits


@dataclass(frozen=True)
class Blocks:
    """The blocks that a model decodes.

    Args:
        length: positions of a block.
        from_text: counted from the first token of every row, instead of from the answer.
    """

    length: int
    from_text: bool

    @classmethod
    def of(cls, config: Any) -> "Blocks | None":
        """The blocks of a model, from its sampler and the default settings; None if its sampler has none."""
        family = family_of(config.model_type)
        name = family.sampler_of(config)
        sampler = algorithms()[name].sampler
        if not sampler.grows:
            return None
        trained = getattr(config, "trained_block_length", None)
        settings = {**family.samplers[name], **({} if trained is None else {"block_length": trained})}
        settings |= getattr(config, "sampler_defaults", None) or {}
        return cls(int(settings.get("block_length") or settings["gen_length"]), sampler.from_text)


def visible_in_copies(
    blocks: Int[Tensor, "batch position"],
    content: Bool[Tensor, "batch position"] | None = None,
    documents: Int[Tensor, "batch position"] | None = None,
) -> Bool[Tensor, "batch query key"]:
    """Which query of [x_t, x_0] sees which key (2503.09573; kuleshov-group/bd3lms, models/dit.py).

    A noisy position sees the noisy positions of its block and the clean ones of earlier blocks; a clean position
    the clean ones of its block and earlier blocks. A position of padding sees itself alone, so that no row of the
    mask is empty, and nothing else sees it.

    Args:
        blocks: number of every position's block, for one copy.
        content: False at padding; None for none.
        documents: positions of different documents do not see each other; None for one document.
    """
    query, key = blocks[:, :, None], blocks[:, None, :]
    same, earlier = query == key, query > key
    nothing = torch.zeros_like(same)
    visible = torch.cat([torch.cat([same, earlier], 2), torch.cat([nothing, same | earlier], 2)], 1)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :]).repeat(1, 2, 2)
    if content is not None:
        twice = content.repeat(1, 2)
        own = torch.eye(twice.shape[1], dtype=torch.bool, device=twice.device)
        visible = visible & twice[:, :, None] & twice[:, None, :] | own & ~twice[:, :, None]
    return visible


def two_copies(
    noisy: Int[Tensor, "batch position"],
    clean: Int[Tensor, "batch position"],
    blocks: Int[Tensor, "batch position"],
    positions: Int[Tensor, "batch position"],
    *,
    dtype: torch.dtype,
    content: Bool[Tensor, "batch position"] | None = None,
    documents: Int[Tensor, "batch position"] | None = None,
) -> dict[str, Tensor]:
    """Arguments of one pass over [x_t, x_0].

    Args:
        noisy: x_t.
        clean: x_0.
        blocks: number of every position's block.
        positions: rotary positions of one copy, which both have.
        dtype: of the additive mask, the model's.
        content: as in `visible_in_copies`.
        documents: likewise.
    """
    visible = visible_in_copies(blocks, content, documents)[:, None]
    # Additive, which every attention function of transformers takes alike.
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return {
        "input_ids": torch.cat([noisy, clean], 1),
        "attention_mask": mask.masked_fill(~visible, torch.finfo(dtype).min),
        "position_ids": positions.repeat(1, 2),
    }


def predicting_output(
    blocks: Int[Tensor, "batch position"], begins: Bool[Tensor, "batch position"], *, shift: bool
) -> Int[Tensor, "batch position"]:
    """Which of the 2S outputs predicts each of the S positions: its own, or with `shift` the one before it.

    The first position of a block is then predicted by the clean output before it, as a sampler reads it: what a
    block begins with follows from the finished text. A text's first position is predicted by its own output.

    Args:
        blocks: number of every position's block.
        begins: where a text begins.
        shift: the output at i - 1 predicts position i.
    """
    index = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks)
    if not shift:
        return index
    new = torch.ones_like(begins)
    new[:, 1:] = blocks[:, 1:] != blocks[:, :-1]
    before = torch.where(new, index - 1 + blocks.shape[1], index - 1)
    return torch.where(begins, index, before)


class TwoCopyLogits(CanvasLogits):
    """Logits of noisy canvases whose clean texts are known, each block given the clean text before it.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
        clean: x_0.
        layout: where the blocks are; `Sampler.block_layout_of`.
        **options: of `CanvasLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        *,
        clean: Int[Tensor, "batch position"],
        layout: BlockLayout,
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.content, self.clean = content, clean
        self.blocks = layout.numbers(content.shape[1])
        begins = torch.zeros_like(content).scatter(1, padding_before(content)[:, None], True)
        self.outputs = predicting_output(self.blocks, begins, shift=self.source is not None)

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """One pass over both copies, for every half."""
        halves = 2 if self.cfg_scale else 1
        blocks, content = self.blocks.repeat(halves, 1), self.content.repeat(halves, 1)
        inputs = two_copies(
            self._halves(canvas), self._halves(self.clean), blocks, position_ids(content),
            dtype=self.model.dtype, content=content,
        )  # fmt: skip
        return self.model.get_decoder()(**inputs, use_cache=False)

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """The inputs of the head for the `needed` positions of x_t."""
        states = self.forward(canvas).last_hidden_state.to(canvas.device)
        halves = states.reshape(-1, len(canvas), 2 * canvas.shape[1], states.shape[-1])
        rows = self._rows(canvas).expand_as(canvas)
        wanted: Tensor = halves[:, rows[needed], self.outputs[needed]]
        return wanted
