"""SMDM's sampler: Dream's timestep schedule with LLaDA's Gumbel scores, greedy or at random."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import PLAIN, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.sampling.network import by_rows, most_likely
from dlm_lens.sampling.noise import Noise, add_gumbel
from dlm_lens.sampling.samplers.selection import Select
from dlm_lens.sampling.samplers.timesteps import TimestepSampler
from dlm_lens.sampling.settings import (
    SpecialIds,
    answer_settings,
    at_least_one,
    inner_eps,
    known_remasking,
    not_negative,
)

REMASKING = ("origin", "greedy", "greddy")


@dataclass(frozen=True)
class SMDMSettings:
    """Settings of SMDM's `diff_sample`; `remasking` is its `alg`, whose "greddy" is our "greedy".

    Args:
        steps: denoising steps.
        gen_length: tokens of the answer.
        temperature: 0 takes the most likely token, above 0 samples.
        cfg_scale: guidance, u + (cfg_scale + 1) (c - u); 0 for none.
        remasking: "origin" unmasks every mask with the schedule's probability; "greedy" the most probable ones.
        eps: the last time of the schedule, which begins at 1.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 1.0
    cfg_scale: float = 2.0
    remasking: str = "origin"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        at_least_one(self, "steps")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "cfg_scale", zero="no guidance")
        known_remasking(self.remasking, REMASKING, REMASKING[:2], "SMDM")
        inner_eps(self.eps)


class SMDMPropose(nn.Module):
    """x0 = argmax of the (noisy) logits; confidence = softmax probability of x0 under the clean ones, in float64.

    With `origin` the confidence is not used. [MASK] has no logit. `reference_quirks` draws the noise at
    temperature 0 too, which only advances the random stream.
    """

    def __init__(self, settings: SMDMSettings, noise: Noise, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise, self.reference_quirks = settings, noise, reference_quirks

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        uniform = None
        if self.settings.temperature > 0 or self.reference_quirks:
            uniform = self.noise.column_rows(evaluated, eligible, logits.shape[-1], masked=True)
        chosen, likely = by_rows(self._chosen, logits, uniform)
        confidence = torch.full(canvas.shape, -torch.inf, dtype=torch.float64, device=canvas.device)
        if self.settings.remasking != "origin":
            confidence = confidence.masked_scatter(evaluated, likely)
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _chosen(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """The tokens and their probabilities, which are not computed where no confidence is used."""
        temperature, scores = self.settings.temperature, logits
        if uniform is not None and temperature > 0:
            scores = add_gumbel(logits, uniform, temperature)
        chosen = most_likely(scores)
        if self.settings.remasking == "origin":
            return chosen, logits.new_zeros(len(chosen))
        return chosen, logits.softmax(-1, dtype=torch.float64).gather(-1, chosen[:, None]).squeeze(-1)


class SelectAcrossRows(Select):
    """One ranking for the whole batch by `torch.topk`, as in the reference.

    `count` holds the batch's number in every row.
    """

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        ranked = confidence[eligible]
        chosen = torch.zeros_like(ranked, dtype=torch.bool)
        chosen[ranked.topk(int(count[0])).indices] = True
        return torch.zeros_like(eligible).masked_scatter(eligible, chosen)


class SMDMSampler(TimestepSampler):
    """The timestep schedule with counts rounded down: greedy remasking unmasks a row's most confident proposals.

    The count is a fraction of each row's own masks; with `reference_quirks` of all masks of the batch, which then
    compete in one ranking. Guidance masks the whole prompt, also positions of it that were unmasked in the run.
    """

    hides_prompt = True

    def __init__(
        self, settings: SMDMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise)
        self.cfg_scale = settings.cfg_scale
        self.coupled = reference_quirks and settings.remasking != "origin"
        self.propose = SMDMPropose(settings, noise, reference_quirks)
        self.select = SelectAcrossRows() if self.coupled else Select()

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row (or of the batch) this step unmasks: float32, rounded down."""
        left = eligible.sum(-1)
        masks = left.sum().expand(len(left)) if self.coupled else left
        if plan.remaining == 1:
            return masks
        return (masks * self.fractions[plan.index].to(masks.device)).long()


ALGORITHM = Algorithm(
    "smdm",
    SMDMSettings,
    SMDMSampler,
    answer_settings,
    f'{PLAIN}; with remasking "origin" -inf',
    corruption=RateCorruption(),
)
