"""dllm's sampler for block diffusion (BD3LM): each block is denoised after the blocks before it, which stay."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import RANKED, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.blocks import BlockSampler, answer_to_write
from dlm_lens.sampling.samplers.dllm import DllmSampler, DllmSettings, OrderedNoise, resolve
from dlm_lens.sampling.settings import SpecialIds, at_least_one


@dataclass(frozen=True)
class DllmBlockSettings(DllmSettings):
    """Settings of dllm's BD3LMSampler (ZHZisZZ/dllm, core/samplers/bd3lm.py), beside those of `DllmSettings`.

    Args:
        steps_per_block: steps of every block, instead of ceil(steps / blocks).
        use_cache: compute finished blocks once, which is exact.

    Raises:
        ValueError: a value is out of its range.
    """

    steps_per_block: int | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "steps_per_block", "gen_length")

    def block_steps(self, positions: int) -> int:
        """Steps of each block, before those that would unmask nothing are left out."""
        return self.steps_per_block or math.ceil(self.steps / self.blocks(positions))


class BlockNoise(OrderedNoise):
    """The random stream of code that draws numbers for the block alone."""

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for all positions of the block, return the evaluated ones'."""
        inside = evaluated[:, slice(*self.span)].cpu()
        return torch.rand(*inside.shape, width, generator=self.generator, dtype=torch.float64)[inside]

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Draw for all positions of the block; 0 elsewhere."""
        values = torch.zeros(eligible.shape, dtype=torch.float32)
        start, stop = self.span
        values[:, start:stop] = torch.rand(len(values), stop - start, generator=self.generator, dtype=torch.float32)
        return values


class DllmBlockSampler(BlockSampler, DllmSampler):
    """dllm's numbers of tokens, block after block; the network sees the canvas up to the block's end.

    A row ends with the block in which it has had an end of the text: its later blocks stay masked, and the run ends
    with its last row. With `reference_quirks` rows that have ended are decoded until all have. By default
    `use_cache` computes finished blocks once. With hooks or an observer every step computes all that it sees.
    """

    stream_class = BlockNoise

    def __init__(
        self, settings: DllmBlockSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        self.use_cache, self.end = settings.use_cache, ids.eos
        self.block_length = settings.block_length or settings.gen_length
        self._stops: list[int] = []

    def ignored(self, model: Any) -> int | None:
        """The padding token, which dllm's code takes for padding wherever it is."""
        return model.config.pad_token_id if self.reference_quirks else None

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.reference_quirks = bool(settings.get("reference_quirks"))
        return sampler

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; the network sees the canvas up to the block's end."""
        found = [replace(plan, seen=plan.span[1]) for plan in super().plans(prompt_length, positions)]
        self._stops = [plan.span[1] for plan in found]
        return found

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks of the block, in rows that have not ended."""
        return masked & self.reach(masked, plan) if self.reference_quirks else super().eligible(masked, plan)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """What `DllmSampler.prepare` gives, and the block that `torch.topk` is given."""
        super().prepare(masked, plan)
        self.select.span = plan.span  # type: ignore[assignment]

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether every row has had an end of the text in a finished block."""
        if self.end is None or plan.remaining > 1:
            return False
        ends = (canvas[:, slice(*plan.span)] == self.end).any(-1)
        self.ended = ends if self.ended is None else self.ended | ends
        return bool(self.ended.all())

    def final_length(self, positions: int, steps: int) -> int:
        """The end of the last block that was decoded."""
        return self._stops[steps - 1] if 0 < steps <= len(self._stops) else positions


def resolve_blocks(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of `dllm.resolve`, with an answer.

    Raises:
        ValueError: there is no answer to write.
    """
    answer_to_write(defaults, given, masks)
    return resolve(defaults, given, masks)


ALGORITHM = Algorithm(
    "dllm_blocks", DllmBlockSettings, DllmBlockSampler, resolve_blocks, RANKED, corruption=CountCorruption()
)
