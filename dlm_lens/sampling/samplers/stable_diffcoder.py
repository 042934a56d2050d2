"""Stable-DiffCoder's sampler: blocks counted from the text, by a threshold or in planned numbers."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import Context
from dlm_lens.sampling.algorithm_registry import RANKED, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.samplers.blocks import answer_to_write
from dlm_lens.sampling.samplers.efficient_dlm import EfficientDLMSampler, EfficientDLMSettings


@dataclass(frozen=True)
class StableDiffCoderSettings(EfficientDLMSettings):
    """Settings of `generate_block` (ByteDance-Seed/Stable-DiffCoder-8B-Instruct, modeling_stable_diffcoder.py).

    Args:
        gen_length: tokens of the answer.
        block_length: tokens of a block, counted from the first token of the text; the answer's first and last
            blocks may be short.
        steps: denoising steps in all, of which each block gets steps / ceil(gen_length / block_length), at most;
            None: one for each mask.
        threshold: a step unmasks the proposals of the block whose probability is at least this, and at least the
            most likely one.
        parallel: False unmasks the planned number at each step, whatever the threshold (the authors' `threshold`
            None): of a block with m masks in n steps m // n, one more in the first m % n steps.
        temperature: 0 takes the most likely token.
        remasking: "low_confidence", the most probable proposals first; "random" with `parallel=False`.
        stop_tokens: ids that end a row (`eos_id`); None for the model's ends of text and turn.
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range, or the steps do not divide into the blocks.
    """

    threshold: float = 0.95
    temperature: float = 0.0
    family_name: ClassVar[str] = "Stable-DiffCoder"
    float64_confidence: ClassVar[bool] = True


class StableDiffCoderSampler(EfficientDLMSampler):
    """Blocks from left to right, each of which sees itself and all before it; the prompt is cut into blocks too.

    A row ends when a stop token in its answer has no mask before it; the rest of its canvas stays masked. The
    authors finish its block and then overwrite what follows the stop token with it.
    """

    context: ClassVar[Context] = "blocks"
    from_text: ClassVar[bool] = True
    any_block_length: ClassVar[bool] = False

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """The tokens requested.

        Raises:
            ValueError: what the authors' code cannot do, with `reference_quirks`.
        """
        if self.reference_quirks and len(prompts) > 1:
            raise ValueError(
                f"the authors' code denoises one prompt at a time, and there are {len(prompts)}: leave "
                "reference_quirks out, or give one prompt"
            )
        return super().answer_length(prompts, gen_length)

    def _steps(self, span: tuple[int, int], positions: int) -> int:
        """Steps of a block, at most: for as many masks as the row with the most has there.

        The authors' code leaves out the steps for which it plans no token, which are those beyond the masks.
        """
        masks = self.most_masks(span, positions)
        steps = self.settings.block_steps(masks)
        return min(steps, masks) if self.reference_quirks else steps

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has a stop token in its answer without a mask before it."""
        return self.rows_ended(canvas)


ALGORITHM = Algorithm(
    "stable_diffcoder",
    StableDiffCoderSettings,
    StableDiffCoderSampler,
    answer_to_write,
    RANKED,
    corruption=CountCorruption(),
)
