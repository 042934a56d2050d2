"""`BlockSampler`: what the samplers of block diffusion share: the network, and rows that end early.

`ContextBlockSampler`: decoding of blocks after a context, by a threshold: what three samplers share.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import BlockLayout
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas, RowEndingSampler
from dlm_lens.sampling.samplers.cached_blocks import SelectConfident, SpanNoise
from dlm_lens.sampling.samplers.llada import GumbelPropose, GumbelSettings
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.settings import SpecialIds, with_token_ids


def block_plans(spans: Sequence[tuple[int, int]], numbers: Sequence[int]) -> list[StepPlan]:
    """So many steps for every block, by its number; the network sees the canvas up to the block's end."""
    every = [(block, step) for block, steps in enumerate(numbers) for step in range(steps)]
    return [
        StepPlan(index, len(every), block, spans[block], numbers[block] - step, seen=spans[block][1])
        for index, (block, step) in enumerate(every)
    ]


class BlockSampler(RowEndingSampler):
    """Base class of samplers that decode block after block, with block causal attention over the finished ones.

    A subclass sets `block_length` and `use_cache`. Blocks begin at the first position of the answer, or with
    `from_text` at each row's first token. A row in `ended` is not decoded any further; `open_first` is what is open
    when the run begins, masks of prompts among it.
    """

    grows = True
    open_first: Bool[Tensor, "batch position"] | None = None

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion."""
        self.open_first = first.masked
        options = {"use_cache": self.use_cache, **self.guidance(model, first)}
        return self.block_logits(model, first.content, self.block_layout, **options)

    def block_logits(
        self, model: Any, content: Bool[Tensor, "batch position"], layout: BlockLayout, **options: Any
    ) -> BlockLogits:
        """The logits of these blocks, in runs and in passes over the canvases of a finished one."""
        return BlockLogits(model, content, layout=layout, ignored=self.ignored(model), **options)

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Block causal attention over what a step sees."""
        layout = self.block_layout_of(self.block_length, content, prompt_length)
        return self.block_logits(model, content, layout).inputs_of(canvas)

    def block_plans(self, begin: int, positions: int, steps: int) -> list[StepPlan]:
        """So many steps for every block of the run from `begin` on."""
        spans = self.block_layout.spans(begin, positions)
        return block_plans(spans, [steps] * len(spans))

    def ignored(self, model: Any) -> int | None:
        """The token that leaves attention once its block is finished, as a reference has it; None for none."""
        return None

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.block_length = int(settings.get("block_length") or settings["gen_length"])
        return sampler


class ContextBlockSettings(GumbelSettings, Protocol):
    """The settings that `ContextBlockSampler` reads."""

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def threshold(self) -> float:
        """The least probability of what a step unmasks beside the most likely proposal."""
        ...

    @property
    def parallel(self) -> bool:
        """Whether the threshold says what a step unmasks."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...] | None:
        """Ids that end a row; None for the model's."""
        ...

    @property
    def use_cache(self) -> bool:
        """Whether finished text is computed once."""
        ...


class ContextBlockSampler(BlockSampler):
    """Base class of samplers of blocks as NVIDIA's `generate` decodes them, from the answer's start on.

    Stable-DiffCoder's are counted from the text.

    A row ends when a stop token in its answer has no mask before it; the rest of its canvas stays masked.

    `reference_quirks`: all rows leave a block when one of them has its end in it, and the masks that are left stay
    in the context; they go on until each has an end somewhere. The canvas then ends with the block, which the
    authors cut off after the last row's first end.

    Attributes:
        propose_class: of the module that proposes tokens.
    """

    adaptive, any_block_length = True, True
    propose_class: ClassVar[type[GumbelPropose]] = GumbelPropose
    reference_quirks = False

    def __init__(
        self, settings: ContextBlockSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.stream: SpanNoise | None = None
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = self.stream = SpanNoise(noise)
        self.settings: Any = settings
        self.reference_quirks, self.mask = reference_quirks, ids.mask
        self.block_length, self.use_cache = settings.block_length, settings.use_cache
        self.propose = self.propose_class(settings, noise, ids, reference_quirks)
        self.select = SelectConfident(settings.threshold, None) if settings.parallel else Select()
        self.select.by_topk = reference_quirks
        ends = ids.ends if reference_quirks else ids.stops
        self.stops = ends if settings.stop_tokens is None else settings.stop_tokens
        self._answer = 0
        self._planned: Int[Tensor, "batch"] | None = None
        self._left_block = -1
        self._end: int | None = None

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested.

        Raises:
            ValueError: what the authors' code cannot do, with `reference_quirks`.
        """
        if self.reference_quirks and gen_length % self.block_length:
            raise ValueError(
                f"the authors' code decodes whole blocks, and gen_length {gen_length} is no multiple of "
                f"block_length {self.block_length}: leave reference_quirks out, or change one of them"
            )
        if self.reference_quirks and not bool(prompts.all()):
            raise ValueError(
                f"the authors' code takes no padding, and these prompts have {prompts.sum(-1).tolist()} tokens: "
                "with reference_quirks give prompts of one length"
            )
        return gen_length

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks of the block that the step sees, in rows that have not ended; none in a block that was left."""
        found = super().eligible(masked, plan)
        return torch.zeros_like(found) if plan.block == self._left_block else found

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The positions that the random stream draws for and that `torch.topk` is given."""
        self.select.span = plan.span  # type: ignore[assignment]
        if self.stream is not None:
            self.stream.span = plan.span

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has a stop token in its answer without a mask before it."""
        return self._finished_as_reference(canvas, plan) if self.reference_quirks else self.rows_ended(canvas)

    def rows_ended(self, canvas: Int[Tensor, "batch position"]) -> bool:
        """Note the rows that have ended; whether all have."""
        stops, masks = self._stops_and_masks(canvas)
        self.ended = (stops & (masks.cumsum(-1) == 0)).any(-1)
        return bool(self.ended.all())

    def _stops_and_masks(
        self, canvas: Int[Tensor, "batch position"]
    ) -> tuple[Bool[Tensor, "batch answer"], Bool[Tensor, "batch answer"]]:
        answer = canvas[:, self._answer :]
        stops = torch.tensor(self.stops, dtype=answer.dtype, device=answer.device)
        return torch.isin(answer, stops), answer == torch.tensor(self.mask, device=answer.device)

    def _finished_as_reference(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        stops, masks = self._stops_and_masks(canvas)
        start = plan.span[0] - self._answer
        block = slice(start, min(start + self.block_length, masks.shape[1]))
        if not self.predicts_next(plan.span) or self.block_length == 1:
            before = masks[:, block].cumsum(-1) > 0
            if bool((stops[:, block] & ~before).any()):
                self._left_block = plan.block
        over = plan.block == self._left_block or plan.remaining == 1 or not bool(masks[:, block].any())
        if not over or not bool(stops[:, : block.stop].any(-1).all()):
            return False
        self._end = self._answer + block.stop
        return True

    def final_length(self, positions: int, steps: int) -> int:
        """All positions; with `reference_quirks` up to the end of the block in which the run ended."""
        return positions if self._end is None else self._end

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and with `reference_quirks` what is known of the block."""
        found = {**super().state(), "left_block": torch.tensor(self._left_block)}
        return found if self._planned is None else {**found, "planned": self._planned}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._left_block, self._planned = int(state["left_block"]), state.get("planned")


def answer_to_write(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings of block diffusion, then the checkpoint's; lists of ids become tuples.

    Raises:
        ValueError: there is no answer to write.
    """
    values = {**defaults, **given}
    if values["gen_length"] < 1:
        raise ValueError(
            f"gen_length is {values['gen_length']}; block diffusion writes an answer after the prompt: give "
            "gen_length of at least 1"
        )
    return with_token_ids(values, "stop_tokens")
