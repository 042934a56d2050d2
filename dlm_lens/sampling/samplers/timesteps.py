"""Samplers that follow a timestep schedule over the whole answer, or over each block: Dream's and SMDM's."""

from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.noise import Noise, RowNoise
from dlm_lens.sampling.samplers.base import Sampler


class TimestepSettings(Protocol):
    """The settings that the schedule reads."""

    @property
    def steps(self) -> int:
        """How many steps there are."""
        ...

    @property
    def gen_length(self) -> int:
        """Tokens of the answer."""
        ...

    @property
    def eps(self) -> float:
        """The last time."""
        ...

    @property
    def remasking(self) -> str:
        """The rule that chooses positions; "origin" chooses at random."""
        ...


class TimestepSampler(Sampler):
    """Step i unmasks the fraction 1 - t[i+1] / t[i] of the masked positions, t = linspace(1, eps, steps + 1).

    With `origin` every masked position is unmasked with that probability. The last step unmasks all that are left.
    With `blocks` the steps are divided among them, and each block has the whole schedule for its own masks.
    """

    def __init__(self, settings: TimestepSettings, noise: Noise, *, blocks: int = 1) -> None:
        super().__init__()
        self.schedule, self.noise = settings, noise
        self.blocks, self.each = blocks, settings.steps // blocks
        times = torch.linspace(1, settings.eps, self.each + 1, dtype=torch.float32)
        self.fractions = [1 - times[i + 1] / times[i] for i in range(self.each)]
        self.draws_positions = settings.remasking == "origin"

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of every block; without blocks the answer is one."""
        total, each = self.each * self.blocks, self.each
        length = self.schedule.gen_length // self.blocks
        ends = [prompt_length + (block + 1) * length for block in range(self.blocks)]
        spans = [(0, positions)] if self.schedule.gen_length == 0 else [(end - length, end) for end in ends]
        return [
            StepPlan(index, total, index // each, spans[index // each], each - index % each)
            for index in range(total)
        ]

    def fraction(self, plan: StepPlan) -> Float[Tensor, ""]:
        """The share of the masks that the step unmasks, or with `origin` the probability of each."""
        return self.fractions[len(self.fractions) - plan.remaining]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Every masked position up to the end of the block."""
        return masked & (torch.arange(masked.shape[1], device=masked.device) < plan.span[1])

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step; with `origin` the positions are drawn first and only theirs are proposed for."""
        if not self.draws_positions:
            return super().forward(canvas, logits, evaluated, masked, plan)
        self.prepare(masked, plan)
        fraction = 1.0 if plan.remaining == 1 else float(self.fraction(plan))
        eligible = self.eligible(masked, plan)
        drawn = self.noise.masked_positions(eligible).to(canvas.device) < fraction
        if not (self.proposes_all and isinstance(self.noise, RowNoise)):
            logits, evaluated = logits[drawn[evaluated]], evaluated & drawn
        eligible = eligible & drawn
        proposal = Proposal(*self.propose(canvas, logits, evaluated, eligible))
        unmasked = self.select(proposal.confidence, eligible, eligible.sum(-1))
        return self.canvas_after(canvas, proposal, unmasked), proposal, unmasked
