"""Logits of block diffusion: block causal attention over the canvas up to the block, with an exact prefix cache.

`CleanContextLogits`: of canvases that begin with clean text, which sees itself alone; the noise after it sees all
(GIDD).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.float32_parts import EqualDtypeCache
from dlm_lens.attention import BlockLayout, additive_mask, decoder_of, padding_before, position_ids
from dlm_lens.attention.cache_argument import cache_argument
from dlm_lens.placement import on_input_device
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import CanvasLogits, LogitsRequest, network_inputs

if TYPE_CHECKING:
    from dlm_lens.sampling.samplers.gidd import GiddSampler


class BlockLogits(CanvasLogits):
    """Logits of the blocks that a step decodes, one in each row; the network sees the canvas up to their last end.

    Keys and values of finished blocks do not depend on later ones: with `use_cache` they are computed once, in the
    pass of the next block's first step, and a step computes its blocks alone. Where rows have blocks at unequal
    positions, the cache ends where the first of them begins: the end of a finished block that another row's block
    overlaps is computed at every step, fewer positions than a block has. Each finished block is computed with all
    its positions in one pass before a part of it is kept, so that every row is what it is alone. An edit of a
    finished block empties the cache.

    In models whose router chooses experts for blocks of tokens (LLaDA2.2) there is no cache where it would cut such
    a block: if the blocks that are decoded are no multiples of it, and in batches whose texts begin at unequal
    places of it.

    Positions between the end of a row's block and the end of the span are computed too. No position that is
    predicted sees them, and statistics do not count them.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        layout: where the blocks are; `Sampler.block_layout_of`.
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
        layout: BlockLayout,
        use_cache: bool = True,
        ignored: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.content, self.layout = content, layout
        self.use_cache, self.ignored = use_cache and self._keeps_experts(), ignored
        self._cache: Any = None
        self._cached = 0
        self._known = content[:, :0].long()
        self._finished = content[:, :0]
        self._last: Tensor | None = None

    def _keeps_experts(self) -> bool:
        """Whether every pass of a cached run would begin where a block of the router begins, in every row."""
        length = getattr(self.model.config, "expert_block_length", None)
        if length is None:
            return True
        begins, texts = self.layout.first % length, padding_before(self.content) % length
        return self.layout.length % length == 0 and bool((begins == texts).all() and (texts == texts[:1]).all())

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions; an edit gets those of every position seen.

        The cache serves positions in the blocks; with others, everything is computed.
        """
        start, stop = plan.span
        canvas, evaluated = canvas[:, :stop], request.evaluated[:, :stop]
        inside = not bool(evaluated[:, :start].any())
        if self.use_cache and inside and not request.everywhere:
            return self.head(self._cached_states(canvas, evaluated, plan.span))
        return super().of_step(canvas, plan, replace(request, evaluated=evaluated))

    def inputs_of(self, canvas: Int[Tensor, "batch seen"]) -> dict[str, Any]:
        """Arguments of a pass over a canvas whose last block is not finished, beside the ids."""
        first, length = self.layout.first, self.layout.length
        blocks = (canvas.shape[1] - 1 - first).div(length, rounding_mode="floor")
        return self._inputs(canvas, 0, first + blocks * length)

    def _inputs(
        self, canvas: Int[Tensor, "batch seen"], start: int, finished: Int[Tensor, "batch"]
    ) -> dict[str, Any]:
        """Mask and positions of the queries from `start` on, for every half; finished blocks end at `finished`."""
        valid, halves = self.content[:, : canvas.shape[1]], 2 if self.cfg_scale else 1
        if self.ignored is not None:
            valid = valid & ~((canvas == self.ignored) & _before(finished, canvas))
        valid = valid.repeat(halves, 1)
        visible = self.layout.repeated(halves).visible(valid, start)
        mask = additive_mask(visible, self.model.dtype)
        inputs = {"attention_mask": mask, "position_ids": position_ids(valid)[:, start:]}
        return {**inputs, "use_cache": False}

    def _cached_states(
        self, canvas: Int[Tensor, "batch seen"], needed: Bool[Tensor, "batch seen"], span: tuple[int, int]
    ) -> Float[Tensor, "half needed d_model"]:
        """The needed positions' states; finished blocks that are not cached yet are computed in the same pass."""
        start, starts = span[0], self.layout.starts(span)
        self._forget_edited(canvas, start)
        states, source = self._advance(canvas, start, starts), self._source(canvas)
        if source is not None:
            # A position is predicted by the output before it, the first of the span by the last one of the cache.
            before = states[:, :0] if self._last is None else self._last
            source = (source[:, start:] - (start - before.shape[1])).repeat(len(states) // len(canvas), 1)
            states = torch.cat([before, states], 1)
            states = states.gather(1, source[..., None].expand(-1, -1, states.shape[-1]))
        halves = states.reshape(-1, len(canvas), canvas.shape[1] - start, states.shape[-1])
        return halves[:, needed[:, start:]]

    def _extend(self, canvas: Int[Tensor, "batch seen"], start: int, finished: Int[Tensor, "batch"]) -> None:
        """Cache the positions before `start`, in a pass over finished blocks alone."""
        self._forget_edited(canvas, start)
        if self._cached < start:
            # Finished blocks that reach beyond `start` are computed whole, and cut off after the pass.
            self._advance(canvas[:, : int(finished.max())], start, finished)

    def _forget_edited(self, canvas: Int[Tensor, "batch seen"], start: int) -> None:
        """Empty the cache where one of the finished blocks in it was edited, or where it reaches beyond `start`."""
        known = self._known.shape[1]
        changed = known > canvas.shape[1] or ((canvas[:, :known] != self._known) & self._finished).any()
        if self._cached > start or bool(changed):
            self._cache, self._cached, self._last = None, 0, None

    def _advance(
        self, canvas: Int[Tensor, "batch seen"], start: int, finished: Int[Tensor, "batch"]
    ) -> Float[Tensor, "row computed d_model"]:
        """A pass over the positions after the cache, which then ends at `start`: the states from there on."""
        begin, cache = self._cached, EqualDtypeCache() if self._cache is None and start else self._cache
        decoder = decoder_of(self.model)
        inputs = self._inputs(canvas, begin, finished) | {"use_cache": cache is not None}
        inputs = on_input_device(self.model, {"input_ids": self._halves(canvas)[:, begin:], **inputs})
        output = decoder(**inputs, **cache_argument(decoder, cache))
        states: Tensor = output.last_hidden_state.to(canvas.device)
        if cache is not None and canvas.shape[1] > start:
            cache.crop(start - canvas.shape[1])
        if begin < start:
            self._cache, self._cached, self._last = cache, start, states[:, start - begin - 1, None]
            whole = canvas[:, : int(finished.max())]
            self._known, self._finished = whole.clone(), _before(finished, whole)
        return states[:, start - begin :]


class FirstBlockLogits(CanvasLogits):
    """Logits of canvases each row of which decodes its first block with a mask, after a causal context.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        layout: where the blocks are.
        **options: of `CanvasLogits`.
    """

    def __init__(
        self, model: Any, content: Bool[Tensor, "batch position"], *, layout: BlockLayout, **options: Any
    ) -> None:
        super().__init__(model, content, **options)
        self.content, self.blocks = content, layout.numbers(content.shape[1])

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Arguments of a pass over the canvas, beside the ids, for every half."""
        open_ = (canvas == self.model.config.mask_token_id) & self.content & (self.blocks >= 0)
        present = self.blocks.masked_fill(~open_, canvas.shape[1]).amin(-1, keepdim=True)
        inside, where = self.blocks == present, torch.arange(canvas.shape[1], device=canvas.device)
        visible = (where <= where[:, None]) | (inside[:, None, :] & inside[:, :, None])
        visible = visible & self.content[:, None, :] & self.content[:, :, None]
        mask = additive_mask(visible[:, None].repeat(2 if self.cfg_scale else 1, 1, 1, 1), self.model.dtype)
        return {**self.inputs, "attention_mask": mask, "use_cache": False}


def _before(stop: Int[Tensor, "batch"], canvas: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
    """The positions before each row's `stop`."""
    return torch.arange(canvas.shape[1], device=canvas.device) < stop[:, None]


def clean_context_inputs(
    model: Any, content: Bool[Tensor, "batch position"], clean: Bool[Tensor, "#batch position"]
) -> dict[str, Any]:
    """Arguments of a pass beside the ids: a query at a clean position sees the clean keys, others see all.

    Padding is no key and no query. Where all is clean, or nothing, no mask of [query, key] is made.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        clean: the positions without noise.
    """
    inputs, clean = network_inputs(content), clean & content
    if not bool(clean.any()) or bool((clean | ~content).all()):
        return inputs
    # One mask for all rows that are alike.
    same = bool((clean == clean[:1]).all()) and bool(content.all())
    clean, content = (clean[:1], content[:1]) if same else (clean, content)
    visible = (~clean[:, :, None] | clean[:, None, :]) & content[:, None, :] & content[:, :, None]
    return {**inputs, "attention_mask": additive_mask(visible[:, None], model.dtype)}


class CleanContextLogits(CanvasLogits):
    """Logits of canvases in which clean positions see no noise.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        clean: the clean positions; of a run its sampler says them at every step (`GiddSampler.at`).
        sampler: of a run.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        clean: Bool[Tensor, "#batch position"] | None = None,
        sampler: "GiddSampler | None" = None,
    ) -> None:
        super().__init__(model, content)
        self.content, self.clean, self.sampler = content, clean, sampler

    def enter(self, plan: StepPlan) -> None:
        """Take where the block of the step begins."""
        if self.sampler is not None:
            self.sampler.at(plan)

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Mask and positions."""
        content = self.content[:, : canvas.shape[1]]
        clean = self.clean if self.sampler is None else self.sampler.clean(content)
        assert clean is not None
        return clean_context_inputs(self.model, content, clean)
