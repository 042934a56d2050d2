"""LLaDA2.1's sampler: LLaDA2.0's blocks, whose tokens are rewritten where another one is likely enough."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas, Revise
from dlm_lens.sampling.samplers.llada2 import BlockwiseSampler, BlockwiseSettings
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative

QUIRK_ROUNDS = 16
"""How often each position of a block can be opened again by the authors' code before we leave the block."""


@dataclass(frozen=True, kw_only=True)
class LLaDA2EditingSettings(BlockwiseSettings):
    """Settings of LLaDA2.1's sampler.

    Args:
        editing_threshold: a decided token is rewritten where another one has a higher confidence.
        max_post_steps: most steps of a block after its last mask; they end as soon as one rewrites nothing.
        num_to_transfer: how many masks a step writes at least.

    Raises:
        ValueError: a value is out of its range.
    """

    editing_threshold: float = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "num_to_transfer")
        not_negative(self, "editing_threshold", zero="rewrite whatever changes")
        not_negative(self, "max_post_steps", zero="leave a block with its last mask")


class LLaDA2EditingSampler(BlockwiseSampler):
    """Each step writes masks above the threshold and rewrites decided tokens of the block, but not of the prompt.

    A row is done with a block at the first step that begins without masks and rewrites nothing, or after
    `max_post_steps` steps that began without masks. Finished blocks are never rewritten, so that their keys and
    values stay in the cache. With `reference_quirks` (one row) a rewritten token may be [MASK], which opens the
    position again; and with `eos_early_stop` the run ends after a block without masks in an answer with an end of
    the text.
    """

    def __init__(
        self, settings: LLaDA2EditingSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        self.settings, self.revise = settings, Revise(settings.editing_threshold)
        self._block = -1
        self._post = self._done = torch.empty(0, dtype=torch.long)

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion.

        Raises:
            ValueError: `reference_quirks` with several rows, which dllm's code refuses.
        """
        if self.reference_quirks and len(first.content) > 1:
            raise ValueError(
                f"reference_quirks with {len(first.content)} prompts: dllm's code edits one row only; leave "
                "reference_quirks out, or run them one by one"
            )
        return super().network(model, first)

    def most_steps(self) -> int:
        """A step for every mask of a block, and the steps after them."""
        rounds = QUIRK_ROUNDS if self.reference_quirks else 1
        return math.ceil(self.block_length / self.settings.num_to_transfer) * rounds + self.settings.max_post_steps

    def _progress(self, masked: Tensor, plan: StepPlan) -> tuple[Int[Tensor, "batch"], Bool[Tensor, "batch"]]:
        """Per row: steps of the block that began without masks, and whether the row is done with the block."""
        if plan.block != self._block:
            nothing = torch.zeros(len(masked), dtype=torch.long, device=masked.device)
            return nothing, nothing.bool()
        return self._post, self._done

    def at_work(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch"]:
        """The rows that have masks in the block, or may still rewrite it."""
        post, done = self._progress(masked, plan)
        block = self.attention.within_own_blocks(self.reach(masked, plan))
        return ((masked & block).any(-1) | (post < self.settings.max_post_steps)) & block.any(-1) & ~done

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Decided tokens of the answer in the block, in rows that are not done with it."""
        return self._answer & ~masked & self.running(masked, plan)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """At least `num_to_transfer`."""
        return eligible.sum(-1).clamp(max=self.settings.num_to_transfer)

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step."""
        post, done = self._progress(masked, plan)
        block = self.attention.within_own_blocks(self.reach(masked, plan))
        working, complete = self.at_work(masked, plan), ~(masked & block).any(-1)
        after, proposal, unmasked = super().forward(canvas, logits, evaluated, masked, plan)
        edited = ((after != canvas) & ~masked).any(-1)
        self._block, self._post = plan.block, post + (working & complete)
        self._done = done | (working & complete & ~edited)
        return after, proposal, unmasked

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has ended."""
        masked = self.open(canvas)
        if self.reference_quirks and self.early and not bool(self.at_work(masked, plan).any()):
            written = self._answer & (torch.arange(canvas.shape[1], device=canvas.device) < plan.span[1])
            return self._has_end(canvas[written]) and not bool(masked[written].any())
        return super().finished(canvas, plan)

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended, and how far each is with the block."""
        return {**super().state(), "block": torch.tensor(self._block), "post": self._post, "done": self._done}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self._block, self._post, self._done = int(state["block"]), state["post"], state["done"]


def resolve(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """The caller's settings, then the checkpoint's; `steps` of the whole answer set `num_to_transfer`."""
    values = {**defaults, **given}
    steps = values.pop("steps", None)
    if steps is not None and "num_to_transfer" not in given:
        length = max(1, values["block_length"])
        each = max(1, math.ceil(steps / max(1, math.ceil(values["gen_length"] / length))))
        values["num_to_transfer"] = math.ceil(length / each)
    return values


ALGORITHM = Algorithm(
    "llada2_editing", LLaDA2EditingSettings, LLaDA2EditingSampler, resolve, FILTERED, corruption=CountCorruption()
)
