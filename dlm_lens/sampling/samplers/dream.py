"""Dream's sampler: a timestep schedule over the whole answer, and four rules that choose the positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.sampling.algorithm_registry import Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import RateCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import Select, SpecialIds
from dlm_lens.sampling.samplers.timesteps import TimestepSampler
from dlm_lens.sampling.settings import answer_settings, at_least_one, inner_eps, known_remasking, not_negative

REMASKING = ("origin", "maskgit_plus", "topk_margin", "entropy")


@dataclass(frozen=True)
class DreamSettings:
    """Settings of Dream's `diffusion_generate`; `remasking` is its `alg`.

    Raises:
        ValueError: a value is out of its range.
    """

    steps: int
    gen_length: int
    temperature: float = 0.0
    remasking: str = "origin"
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3

    def __post_init__(self) -> None:
        at_least_one(self, "steps")
        not_negative(self, "temperature", "alg_temp", zero="greedy")
        known_remasking(self.remasking, REMASKING, REMASKING, "Dream")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        at_least_one(self, "top_k")
        inner_eps(self.eps)


def filtered(
    logits: Float[Tensor, "n d_vocab"], top_p: float | None, top_k: int | None
) -> Float[Tensor, "n d_vocab"]:
    """Logits outside the nucleus or the top k become the dtype's minimum; the token that crosses top_p stays."""
    floor = torch.finfo(logits.dtype).min
    if top_p is not None and top_p < 1:
        values, order = logits.sort(descending=True)
        beyond = values.softmax(-1).cumsum(-1) > top_p
        beyond = torch.cat([torch.zeros_like(beyond[:, :1]), beyond[:, :-1]], -1)
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), floor)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, floor)
    return logits


class DreamPropose(nn.Module):
    """x0 from softmax(filtered(logits / temperature)), and the confidence of the rule.

    maskgit_plus: the probability of x0; topk_margin: largest minus second largest probability; entropy:
    sum p ln(p + 1e-10). With `origin` the confidence is not used. [MASK] is never an x0 unless
    `reference_quirks`: the filter is one of the other tokens, and without a filter the probabilities are those of
    all tokens.
    """

    def __init__(self, settings: DreamSettings, noise: Noise, ids: SpecialIds, reference_quirks: bool) -> None:
        super().__init__()
        self.settings, self.noise = settings, noise
        self.never = None if reference_quirks else ids.mask

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        settings = self.settings
        if settings.temperature > 0:
            logits = logits / settings.temperature
        if settings.top_p is not None or settings.top_k is not None:
            # [MASK] leaves before the filter, which may keep nothing else.
            logits = self._written(logits, -torch.inf)
        likely = filtered(logits, settings.top_p, settings.top_k).softmax(-1)
        choice = self._written(likely, 0.0)
        chosen = self.noise.tokens(choice, evaluated, eligible) if settings.temperature > 0 else choice.argmax(-1)
        confidence = torch.full(canvas.shape, -torch.inf, device=canvas.device)
        if settings.remasking != "origin":
            confidence = confidence.masked_scatter(evaluated, self._confidence(likely, chosen).float())
        return Proposal(canvas.masked_scatter(evaluated, chosen), confidence.masked_fill(~eligible, -torch.inf))

    def _written(self, values: Float[Tensor, "n d_vocab"], nothing: float) -> Float[Tensor, "n d_vocab"]:
        """The values with `nothing` for [MASK], which may not be proposed."""
        if self.never is None:
            return values
        return values.index_fill(-1, torch.tensor([self.never], device=values.device), nothing)

    def _confidence(self, likely: Float[Tensor, "n d_vocab"], chosen: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        if self.settings.remasking == "topk_margin":
            first, second = likely.topk(2).values.unbind(-1)
            return first - second
        if self.settings.remasking == "entropy":
            return (likely * torch.log(likely + 1e-10)).sum(-1)
        return likely.gather(-1, chosen[:, None]).squeeze(-1)


class SelectDrawn(nn.Module):
    """Draw `count` eligible positions per row without replacement, from softmax(confidence / alg_temp)."""

    def __init__(self, noise: Noise, alg_temp: float) -> None:
        super().__init__()
        self.noise, self.alg_temp = noise, alg_temp

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks."""
        weights = (confidence / self.alg_temp).masked_fill(~eligible, -torch.inf)
        return self.noise.draw(weights, eligible, count) & eligible


class DreamSampler(TimestepSampler):
    """The timestep schedule with counts rounded down, so that as many steps as tokens is not one token per step.

    The count is a fraction of each row's own masks, recounted at every step; `reference_quirks` takes the average
    number of masks over the batch.
    """

    def __init__(
        self, settings: DreamSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise)
        self.settings, self.reference_quirks = settings, reference_quirks
        self.propose = DreamPropose(settings, noise, ids, reference_quirks)
        drawn = settings.alg_temp and settings.remasking != "origin"
        self.select: nn.Module = SelectDrawn(noise, settings.alg_temp or 0.0) if drawn else Select()

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks: float32, rounded down, as in the reference."""
        left = eligible.sum(-1)
        if plan.remaining == 1:
            return left
        masks = (left.sum() / len(left)).expand(len(left)) if self.reference_quirks else left.float()
        return (masks * self.fractions[plan.index].to(masks.device)).long()


ALGORITHM = Algorithm(
    "dream", DreamSettings, DreamSampler, answer_settings, corruption=RateCorruption(eps=1e-3, protect_ends=True)
)
