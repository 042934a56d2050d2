"""`BlockSampler`: what the samplers of block diffusion share: the network, and rows that end early."""

from collections.abc import Mapping
from typing import Any, Self

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import BlockLayout
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.samplers.base import FirstCanvas, RowEndingSampler


def block_plans(layout: BlockLayout, begin: int, positions: int, steps: int) -> list[StepPlan]:
    """So many steps for every block from `begin` on; the network sees the canvas up to the block's end."""
    spans = layout.spans(begin, positions)
    return [
        StepPlan(block * steps + step, len(spans) * steps, block, span, steps - step, seen=span[1])
        for block, span in enumerate(spans)
        for step in range(steps)
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
        return block_plans(self.block_layout, begin, positions, steps)

    def ignored(self, model: Any) -> int | None:
        """The token that leaves attention once its block is finished, as a reference has it; None for none."""
        return None

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.block_length = int(settings.get("block_length") or settings["gen_length"])
        return sampler
