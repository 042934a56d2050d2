"""Samplers that follow a timestep schedule over the whole answer, without blocks: Dream's and SMDM's."""

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
    """

    def __init__(self, settings: TimestepSettings, noise: Noise) -> None:
        super().__init__()
        self.schedule, self.noise = settings, noise
        times = torch.linspace(1, settings.eps, settings.steps + 1)
        self.fractions = [1 - times[i + 1] / times[i] for i in range(settings.steps)]

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step; there are no blocks."""
        total = self.schedule.steps
        span = (0 if self.schedule.gen_length == 0 else prompt_length, positions)
        return [StepPlan(index, total, 0, span, total - index) for index in range(total)]

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Every masked position."""
        return masked

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step; with `origin` the positions are drawn first and only theirs are proposed for."""
        if self.schedule.remasking != "origin":
            return super().forward(canvas, logits, evaluated, masked, plan)
        fraction = 1.0 if plan.remaining == 1 else float(self.fractions[plan.index])
        drawn = self.noise.masked_positions(masked).to(canvas.device) < fraction
        if not (self.proposes_all and isinstance(self.noise, RowNoise)):
            logits, evaluated = logits[drawn[evaluated]], evaluated & drawn
        eligible = masked & drawn
        proposal = Proposal(*self.propose(canvas, logits, evaluated, eligible))
        unmasked = self.select(proposal.confidence, eligible, eligible.sum(-1))
        return torch.where(unmasked, proposal.tokens, canvas), proposal, unmasked
