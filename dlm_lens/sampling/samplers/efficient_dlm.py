"""Efficient-DLM's sampler: blocks after a prompt that is seen whole, by a threshold or in planned numbers."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import Context
from dlm_lens.sampling.algorithm_registry import RANKED, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.samplers.blocks import ContextBlockSampler, answer_to_write, block_plans
from dlm_lens.sampling.samplers.llada import REMASKING
from dlm_lens.sampling.settings import at_least_one, known_remasking, not_negative


@dataclass(frozen=True)
class EfficientDLMSettings:
    """Settings of `generate` (nvidia/Efficient-DLM-8B; generate_with_prefix_cache_block_diff).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`).
        block_length: tokens of a block, counted from the answer; the last one may be short.
        steps: denoising steps in all, of which each block gets steps / blocks, at most; None: one for each token.
        threshold: a step unmasks the proposals of the block whose probability is at least this, and at least the
            most likely one.
        parallel: False unmasks the planned number at each step, whatever the threshold (the authors' `threshold`
            None): of a block of b positions in n steps b // n, one more in the first b % n steps.
        temperature: 0 takes the most likely token.
        remasking: "low_confidence", the most probable proposals first; "random" with `parallel=False`.
        stop_tokens: ids that end a row; None for the model's ends of text and turn.
        use_cache: compute prompt and finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range, or the steps do not divide into the blocks.
    """

    gen_length: int
    block_length: int
    steps: int | None = None
    threshold: float = 0.9
    parallel: bool = True
    temperature: float = 0.7
    remasking: str = "low_confidence"
    stop_tokens: tuple[int, ...] | None = None
    use_cache: bool = True
    family_name: ClassVar[str] = "Efficient-DLM"
    float64_confidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length", "steps")
        not_negative(self, "temperature", zero="greedy")
        known_remasking(self.remasking, REMASKING, REMASKING, self.family_name)
        if not 0 <= self.threshold <= 1:
            raise ValueError(
                f"threshold is {self.threshold}; it is a probability from 0 to 1 (parallel=False: planned numbers)"
            )
        if self.parallel and self.remasking == "random":
            raise ValueError(
                "the threshold compares probabilities, which remasking='random' does not have; give parallel=False"
            )
        blocks = -(-self.gen_length // self.block_length)
        if self.steps is not None and self.steps % blocks:
            raise ValueError(
                f"{self.steps} steps do not divide into {blocks} blocks (gen_length {self.gen_length} / "
                f"block_length {self.block_length}); choose steps as a multiple of {blocks}"
            )

    def block_steps(self, positions: int) -> int:
        """Steps of a block of so many positions, at most."""
        if self.steps is None:
            return positions
        return self.steps // -(-self.gen_length // self.block_length)


class EfficientDLMSampler(ContextBlockSampler):
    """Blocks from left to right; a block sees itself, the finished blocks and the whole prompt.

    The prompt sees itself in both directions, and every mask is predicted at its own position. The last planned
    step of a block unmasks what is left; with `reference_quirks` it stays masked.
    """

    context: ClassVar[Context] = "whole"
    _numbers: tuple[int, ...] = ()

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block, at most."""
        self._answer = prompt_length
        spans = self.block_layout.spans(prompt_length, positions)
        self._numbers = tuple(self._steps(span, positions) for span in spans)
        return block_plans(spans, self._numbers)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row beside those above the threshold, or the planned number; at the last step what is left.

        The planned number is that of the row's masks at the first step of the block.
        """
        left, steps = eligible.sum(-1), self._numbers[plan.block]
        done = steps - plan.remaining
        if done == 0 or self._planned is None:
            self._planned = left
        if plan.remaining == 1 and not self.reference_quirks:
            return left
        if self.settings.parallel:
            return eligible.any(-1).long()
        return self._planned // steps + (done < self._planned % steps)

    def _steps(self, span: tuple[int, int], positions: int) -> int:
        """Steps of a block, at most: for as many masks as the row with the most has there.

        The authors' code counts the positions of the answer.
        """
        if self.reference_quirks:
            return self.settings.block_steps(min(span[1] - max(span[0], self._answer), self.block_length))
        return self.settings.block_steps(self.most_masks(span, positions))

    def most_masks(self, span: tuple[int, int], positions: int) -> int:
        """Masks that the row with the most has in a block when the run begins."""
        assert self.open_first is not None
        inside = self.block_layout.inside(span, positions).to(self.open_first.device) & self.open_first
        return int(inside.sum(-1).amax())


ALGORITHM = Algorithm(
    "efficient_dlm",
    EfficientDLMSettings,
    EfficientDLMSampler,
    answer_to_write,
    RANKED,
    corruption=CountCorruption(),
)
