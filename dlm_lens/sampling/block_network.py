"""Logits of block diffusion: block causal attention over the canvas up to the block, with an exact prefix cache."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from dlm_lens.attention import position_ids
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import CanvasLogits, EditLogits


def block_causal(
    content: Bool[Tensor, "batch position"], block_length: int, first: int
) -> Bool[Tensor, "batch 1 query key"]:
    """Which query sees which key: those of its own and earlier blocks; position i is in floor((i - first) / b).

    Args:
        content: False at padding, which neither sees nor is seen.
        block_length: b.
        first: where a block begins; blocks before it are counted from there, so that the earliest may be short.
    """
    block = (torch.arange(content.shape[1], device=content.device) - first).div(block_length, rounding_mode="floor")
    earlier = block[None, :] <= block[:, None]
    return (earlier & content[:, None, :] & content[:, :, None])[:, None]


class BlockLogits(CanvasLogits):
    """Logits of the block that a step decodes; the network sees the canvas up to its end, block by block.

    Keys and values of finished blocks do not depend on later ones: with `use_cache` they are computed once, and a
    step computes its block alone. An edit of a finished block empties the cache.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        block_length: of the blocks.
        prompt_length: positions before the answer, whose first block begins there.
        use_cache: keep keys and values of finished blocks.
        ignored: a token that leaves attention and the count of positions once its block is finished (a quirk of
            dllm's code, which takes every padding token for padding).
        **options: of `CanvasLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        *,
        block_length: int,
        prompt_length: int,
        use_cache: bool = True,
        ignored: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.content, self.block_length, self.first = content, block_length, prompt_length
        self.use_cache, self.ignored = use_cache, ignored
        self._cache: Any = None
        self._cached = content.new_zeros(len(content), 0, dtype=torch.long)
        self._last: Tensor | None = None

    def of_step(
        self,
        canvas: Int[Tensor, "batch position"],
        evaluated: Bool[Tensor, "batch position"],
        plan: StepPlan,
        *,
        own_forward: bool,
        grad: bool = False,
        edit: EditLogits | None = None,
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions, which lie in the block; `edit` gets those of every position seen."""
        stop = plan.span[1]
        if self.use_cache and not own_forward and edit is None:
            return self.head(self._cached_states(canvas[:, :stop], evaluated[:, :stop], plan.span[0]))
        return super().of_step(
            canvas[:, :stop], evaluated[:, :stop], plan, own_forward=own_forward, grad=grad, edit=edit
        )

    def _inputs(self, canvas: Int[Tensor, "batch seen"], start: int, finished: int) -> dict[str, Any]:
        """Mask and positions of the queries from `start` on, for every half; blocks end at `finished`."""
        valid = self.content[:, : canvas.shape[1]]
        if self.ignored is not None:
            done = torch.arange(canvas.shape[1], device=canvas.device) < finished
            valid = valid & ~((canvas == self.ignored) & done)
        valid = valid.repeat(2 if self.cfg_scale else 1, 1)
        visible = block_causal(valid, self.block_length, self.first)[:, :, start:]
        # Additive, which every attention function of transformers takes alike.
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask = mask.masked_fill(~visible, torch.finfo(dtype).min)
        inputs = {"attention_mask": {"full_attention": mask}, "position_ids": position_ids(valid)[:, start:]}
        return {**inputs, "use_cache": False}

    def inputs_of(self, canvas: Int[Tensor, "batch seen"]) -> dict[str, Any]:
        """Arguments of a pass over a canvas whose last block is not finished, beside the ids."""
        blocks = (canvas.shape[1] - 1 - self.first) // self.block_length
        return self._inputs(canvas, 0, self.first + blocks * self.block_length)

    def _cached_states(
        self, canvas: Int[Tensor, "batch seen"], needed: Bool[Tensor, "batch seen"], start: int
    ) -> Float[Tensor, "half needed d_model"]:
        """The block's states, after the finished blocks that are not cached yet."""
        self._extend(canvas[:, :start])
        ids, inputs = self._halves(canvas)[:, start:], self._inputs(canvas, start, start)
        output = self.model.get_decoder()(input_ids=ids, **inputs, past_key_values=self._cache)
        if self._cache is not None:
            self._cache.crop(start - canvas.shape[1])  # as many as the block added
        states = output.last_hidden_state.to(canvas.device)
        if self.source is not None:
            # The block's first position is predicted by the output before it.
            before = states[:, :1] if self._last is None else self._last
            states = torch.cat([before, states[:, :-1]], 1)
        halves = states.reshape(-1, len(canvas), canvas.shape[1] - start, states.shape[-1])
        return halves[:, needed[:, start:]]

    def _extend(self, finished: Int[Tensor, "batch finished"]) -> None:
        """Add finished blocks to the cache; begin anew where one of those in it was edited."""
        known = self._cached.shape[1]
        if known > finished.shape[1] or not finished[:, :known].equal(self._cached):
            self._cache, known = None, 0
        if finished.shape[1] == known:
            return
        cache = DynamicCache() if self._cache is None else self._cache
        inputs = {**self._inputs(finished, known, finished.shape[1]), "use_cache": True, "past_key_values": cache}
        output = self.model.get_decoder()(input_ids=self._halves(finished)[:, known:], **inputs)
        self._cache, self._cached = output.past_key_values, finished.clone()
        self._last = output.last_hidden_state[:, -1:].to(finished.device)
