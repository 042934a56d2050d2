"""Nemotron-Labs-Diffusion's sampler: blocks after a causal context, whose first token the context predicts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import Context, predicting_position
from dlm_lens.sampling.algorithm_registry import PLAIN, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.blocks import ContextBlockSampler, answer_to_write, block_plans
from dlm_lens.sampling.samplers.llada import GumbelPropose, without
from dlm_lens.sampling.settings import at_least_one, not_negative


@dataclass(frozen=True)
class NemotronLabsDiffusionSettings:
    """Settings of `generate` (nvidia/Nemotron-Labs-Diffusion-8B, modeling_nemotron_labs_diffusion.py).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`).
        block_length: tokens of a block, counted from the answer; the last one may be short.
        threshold: a step unmasks the proposals of the block whose probability is at least this, and at least the
            most likely one.
        parallel: False unmasks one token a step, whatever the threshold (the authors' `threshold` None).
        temperature: 0 takes the most likely token.
        stop_tokens: ids that end a row (`eos_token_id`); None for the model's ends of text and turn.
        use_cache: compute finished text once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    threshold: float = 0.9
    parallel: bool = True
    temperature: float = 0.0
    stop_tokens: tuple[int, ...] | None = None
    use_cache: bool = True
    remasking: ClassVar[str] = "low_confidence"
    float64_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length")
        not_negative(self, "temperature", zero="greedy")
        if not 0 <= self.threshold <= 1:
            raise ValueError(
                f"threshold is {self.threshold}; it is a probability from 0 to 1 (parallel=False: one token a step)"
            )


class FirstOrGumbelPropose(GumbelPropose):
    """`GumbelPropose`; with `reference_quirks` a block's first token is drawn by `torch.multinomial`.

    Both sample from softmax(logits / temperature), with other numbers of the random stream.

    Attributes:
        first: whether the step decides the first token of a block.
    """

    first = False

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        if not (self.first and self.temperature > 0 and isinstance(self.noise, SharedNoise)):
            return super().forward(canvas, logits, evaluated, eligible)
        kept = without(logits, self.never)
        chosen = self.noise.tokens((kept / self.temperature).softmax(-1), evaluated, eligible)
        likely = logits.softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
        confidence = likely.new_zeros(canvas.shape).masked_scatter(evaluated, likely)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))


class CausalContextLogits(BlockLogits):
    """Logits of a block after a causal context.

    A canvas that ends with the first position of a block is seen causally as a whole, and its output at i - 1
    predicts position i; in the others every position is predicted by its own output.
    """

    def _source(self, canvas: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"] | None:
        length = canvas.shape[1]
        if (length - 1 - int(self.layout.first[0])) % self.layout.length:
            return None
        return predicting_position(self.content[:, :length])


class NemotronLabsDiffusionSampler(ContextBlockSampler):
    """Blocks from left to right: prompt and finished blocks are seen causally, the block itself in both directions.

    The first step of a block sees the canvas up to the block's first position, all of it causally: the output at
    the last decided token predicts that position, as in an AR model. Further steps see the whole block, and each of
    its masks is predicted at its own position.
    """

    context: ClassVar[Context] = "causal"
    propose_class = FirstOrGumbelPropose
    propose: FirstOrGumbelPropose

    @classmethod
    def predicts_next(cls, span: tuple[int, int]) -> bool:
        """The first step of a block, whose span is its first position."""
        return span[1] - span[0] == 1

    def network(self, model: Any, first: FirstCanvas) -> CausalContextLogits:
        """The network of the blocks."""
        return CausalContextLogits(model, first.content, layout=self.block_layout, use_cache=self.use_cache)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Of each block the step of its first token, and one for every other position, at most.

        With `reference_quirks` one more, since a first token that is [MASK] is decoded like the others.
        """
        self._answer = prompt_length
        spans = self.block_layout.spans(prompt_length, positions)
        numbers = [stop - start + self.reference_quirks for start, stop in spans]
        found = block_plans(spans, numbers)
        for index, plan in enumerate(found):
            if plan.remaining == numbers[plan.block]:
                stop = plan.span[0] + 1
                found[index] = replace(plan, span=(plan.span[0], stop), seen=stop)
        return found

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row, beside those above the threshold; at the last planned step of a block what is left.

        With `reference_quirks` and one token a step no more than the block had masks after its first token.
        """
        one = eligible.any(-1).long()
        if not self.reference_quirks:
            return eligible.sum(-1) if plan.remaining == 1 else one
        if self.settings.parallel or self.predicts_next(plan.span):
            return one
        done = plan.span[1] - plan.span[0] - plan.remaining
        if done == 0 or self._planned is None:
            self._planned = eligible.sum(-1)
        return one * (done < self._planned)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """What the step decides, and the positions that the random stream draws for and `torch.topk` is given."""
        super().prepare(masked, plan)
        self.propose.first = self.predicts_next(plan.span)


ALGORITHM = Algorithm(
    "nemotron_labs_diffusion",
    NemotronLabsDiffusionSettings,
    NemotronLabsDiffusionSampler,
    answer_to_write,
    PLAIN,
    corruption=CountCorruption(),
)
