"""MDLM's sampler: ancestral sampling, in which each position is unmasked with the probability of the schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of, takes_noise_level
from dlm_lens.attention.model_access import has_listeners
from dlm_lens.placement import input_device
from dlm_lens.sampling.algorithm_registry import BESIDE_MASK, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.network import CanvasLogits, LogitsRequest, Rows, by_rows, most_likely
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler, one_block
from dlm_lens.sampling.samplers.dllm import OrderedNoise
from dlm_lens.sampling.settings import SpecialIds, answer_settings, at_least_one, inner_eps, not_negative, of_run


@dataclass(frozen=True)
class MDLMSettings:
    """Settings of MDLM's `_sample` (kuleshov-group/mdlm, diffusion.py).

    Args:
        steps: of the schedule t = linspace(1, eps, steps + 1).
        gen_length: tokens of the answer.
        predictor: the share m of masked tokens at time t: "ddpm", 1 - exp(-sigma(t)) = (1 - 1e-3) t; "ddpm_cache",
            t itself. The network runs again only where the canvas has changed, with both.
        noise_removal: one more step, which writes the most likely token at every mask that is left.
        eps: the last time.
        temperature: of the tokens' probabilities; 0 takes the most likely token (which positions are unmasked stays
            random). The original has 1.

    Raises:
        ValueError: a value is out of its range.
    """

    predictors: ClassVar[tuple[str, ...]] = ("ddpm", "ddpm_cache")
    steps: int
    gen_length: int
    predictor: str = "ddpm_cache"
    noise_removal: bool = True
    eps: float = 1e-5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        at_least_one(self, "steps")
        not_negative(self, "temperature", zero="greedy")
        inner_eps(self.eps)
        if self.predictor not in self.predictors:
            raise ValueError(f"predictor is {self.predictor!r}; it must be one of {', '.join(self.predictors)}")
        if not isinstance(self.noise_removal, bool):
            raise ValueError(f"noise_removal is {self.noise_removal!r}; it must be True or False")


class Times(NamedTuple):
    """A step's noise.

    Args:
        sigma: what the network is given, if it is given anything.
        unmasked: weight of a token, up to its probability: the share of tokens that the step unmasks.
        masked: weight of [MASK]: the share that stays masked; 0 where every mask is to be written.
        drawn: whether tokens are drawn, or the most likely ones taken.
    """

    sigma: float
    unmasked: float
    masked: float
    drawn: bool = True


def times_of(settings: MDLMSettings, index: int) -> Times:
    """The noise of a step, in float32 as the original computes it.

    With t and s = t - (1 - eps) / steps the shares are m(t) - m(s) and m(s).
    """
    schedule = torch.linspace(1, settings.eps, settings.steps + 1, dtype=torch.float32)
    t = schedule[index]
    s = t - (1 - settings.eps) / settings.steps
    sigma = float(sigma_of((1 - NOISE_EPS) * t))
    if index == settings.steps:
        return Times(sigma, 1.0, 0.0, drawn=False)
    if settings.predictor == "ddpm":
        t, s = (1 - torch.exp(-sigma_of((1 - NOISE_EPS) * time)) for time in (t, s))
    return Times(sigma, float(t - s), float(s))


def exponential(uniform: Float[Tensor, "n d_vocab"], *, reference_quirks: bool) -> Float[Tensor, "n d_vocab"]:
    """Exponential numbers g = -ln u: the argmax of w / g is a draw with the weights w (Gumbel's trick).

    The original keeps the logarithm from 0: g = 1e-10 - ln(u + 1e-10).
    """
    return 1e-10 - torch.log(uniform + 1e-10) if reference_quirks else -torch.log(uniform)


class Float32Noise(OrderedNoise):
    """The original's stream: float32 numbers for every position and column of the batch."""

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for all positions of the batch, return the evaluated ones'."""
        return torch.rand(*evaluated.shape, width, generator=self.generator, dtype=torch.float32)[evaluated.cpu()]


def log_probabilities(
    logits: Float[Tensor, "n d_vocab"], mask: int | None, temperature: float = 1.0, *, rounded_twice: bool = False
) -> Float[Tensor, "n d_vocab"]:
    """Ln p(x0) of masked positions in the SUBS parameterisation (2406.07524, section 3.2.3): [MASK] has none.

    Of an unmasked position the original's is 0 for its token and -inf for all others. With `rounded_twice`, as in
    the original, the logsumexp is rounded to the dtype of the logits before it is subtracted.
    """
    if mask is not None:
        logits = logits.index_fill(-1, torch.tensor([mask], device=logits.device), -torch.inf)
    if temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(-1, most_likely(logits)[:, None], 0.0)
    scaled = logits / temperature
    return scaled - scaled.logsumexp(-1, keepdim=True) if rounded_twice else scaled.log_softmax(-1)


def within_nucleus(likely: Float[Tensor, "n d_vocab"], nucleus_p: float) -> Float[Tensor, "n d_vocab"]:
    """The probabilities of the most likely tokens that sum to at most `nucleus_p`, divided by their sum.

    The token that crosses it is left out, but never the first (kuleshov-group/bd3lms and remdm, diffusion.py).
    """
    if nucleus_p == 1:
        return likely
    ranked, order = likely.sort(-1, descending=True)
    inside = ranked.cumsum(-1) <= nucleus_p
    inside[:, 0] = True
    kept = torch.zeros_like(likely).scatter(-1, order, ranked * inside)
    return kept / kept.sum(-1, keepdim=True)


class AncestralPropose(nn.Module):
    """x0 drawn from p(x0), and how strongly its draw stands against that of [MASK].

    One draw of the original takes the argmax over tokens and [MASK] of s = weight / g, g = -ln u with a uniform u
    for each (Gumbel's trick); a token's weight is p times the share of tokens that the step unmasks, [MASK]'s the
    share that stays masked. x0 is the best token, its confidence s(x0) / (s(x0) + s([MASK])): the step unmasks
    where it is at least one half.

    Attributes:
        times: of the step.
    """

    times = Times(0.0, 1.0, 0.0)

    def __init__(self, temperature: float, noise: Noise, mask: int | None, *, reference_quirks: bool) -> None:
        super().__init__()
        self.temperature, self.noise, self.mask = temperature, noise, mask
        self.reference_quirks = reference_quirks

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Proposal:
        """Return x0 for every evaluated position and the confidence of the eligible ones."""
        uniform = self.uniform(evaluated, eligible, logits.shape[-1]) if self.times.drawn else None
        chosen, share = by_rows(self.drawn, logits, uniform, whole=self.reference_quirks)
        confidence = torch.full(canvas.shape, -torch.inf, dtype=share.dtype, device=canvas.device)
        confidence = confidence.masked_scatter(evaluated, share.to(canvas.device))
        tokens = canvas.masked_scatter(evaluated, chosen.to(canvas.device))
        return Proposal(tokens, confidence.masked_fill(~eligible, -torch.inf))

    def drawn(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """X0 and its confidence; without numbers the token with the greatest weight."""
        weights, masked = self.weights(logits)
        against = torch.zeros_like(weights[:, 0])
        if uniform is not None:
            gumbel = exponential(uniform.to(weights), reference_quirks=self.reference_quirks)
            weights = weights / gumbel
            if self.mask is not None:
                against = masked / gumbel[:, self.mask]
                weights = weights.index_fill(-1, torch.tensor([self.mask], device=weights.device), -torch.inf)
        best, chosen = weights.max(-1)
        return chosen, (best / (best + against)).nan_to_num(1.0)  # inf / inf: a token whose u is 1

    def weights(
        self, logits: Float[Tensor, "evaluated d_vocab"]
    ) -> tuple[Float[Tensor, "evaluated d_vocab"], Float[Tensor, "#evaluated"] | float]:
        """Weights of the tokens, up to a factor the probabilities of the step, and that of [MASK]."""
        return self.probabilities(logits) * self.times.unmasked, self.times.masked

    def uniform(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Rows:
        """A number for every evaluated position and column."""
        return self.noise.column_rows(evaluated, eligible, width)

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x0), in float64; in the original in the dtype of the logits, which its shares turn into float32."""
        if self.reference_quirks:
            return log_probabilities(logits, self.mask, self.temperature, rounded_twice=True).exp().float()
        return log_probabilities(logits.double(), self.mask, self.temperature).exp()


class SelectLikelier(nn.Module):
    """Choose the eligible positions whose token's draw is at least as strong as that of [MASK]."""

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks; `count` has no part in it."""
        return eligible & (confidence >= 0.5)


class NoiseConditionedLogits(CanvasLogits):
    """Logits of a network that may be given the noise level; those of a canvas that has not changed are kept.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        sampler: which knows the noise level of the step.
        **options: of `CanvasLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        sampler: "NoiseConditionedSampler",
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.sampler = sampler
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def enter(self, plan: StepPlan) -> None:
        """Take the step's noise level."""
        self.sampler.at(plan)

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions, without a pass where canvas and positions are those of the last step.

        Nor is there one where no position is evaluated, if the sampler `leaves_out_passes`. A network that is
        given the noise level has one at every other step, and while anything listens to the model every step has.
        """
        if request.everywhere or has_listeners(self.model):
            return super().of_step(canvas, plan, request)
        evaluated = request.evaluated
        if self.sampler.leaves_out_passes and not bool(evaluated.any()):
            weight = self.model.get_input_embeddings().weight
            return self.head(torch.empty(1, 0, weight.shape[-1], dtype=weight.dtype, device=canvas.device))
        if takes_noise_level(self.model) and not self.sampler.keeps_stale:
            return super().of_step(canvas, plan, request)
        if self._kept is None or not (self._kept[0].equal(canvas) and self._kept[1].equal(evaluated)):
            self._kept = (canvas, evaluated, super().of_step(canvas, plan, request))
        return self._kept[2]

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """The noise level beside the other arguments."""
        return {**super().inputs_of(canvas), **self.sampler.noise_inputs(self.model, len(self._halves(canvas)))}


class NoiseConditionedSampler(Sampler):
    """A sampler whose network may be given the noise level of the step, as `sigma`.

    Attributes:
        keeps_stale: logits of an unchanged canvas are kept although the noise level has changed (a quirk of
            BD3-LM's code).
        leaves_out_passes: steps that run although no position is masked make no pass.
    """

    keeps_stale = False
    leaves_out_passes = False

    def network(self, model: Any, first: FirstCanvas) -> CanvasLogits:
        """The network of the canvas, given the noise level of the step if it is given any."""
        return NoiseConditionedLogits(model, first.content, self, **self.guidance(model, first))

    def noise_inputs(self, model: Any, rows: int) -> dict[str, Any]:
        """The argument of a pass that gives the network the noise level; none where it takes none."""
        if self.sigma is None or not takes_noise_level(model):
            return {}
        # On the canvas' device: the weights of an offloaded model are on "meta".
        return {"sigma": torch.full((rows,), self.sigma, dtype=torch.float32, device=input_device(model))}

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Arguments of a pass over what a step sees, beside the ids."""
        inputs = super().inputs(model, content, canvas, prompt_length)
        return {**inputs, **self.noise_inputs(model, len(canvas))}


class MDLMSampler(NoiseConditionedSampler):
    """Ancestral sampling (2406.07524, equation 6): each mask becomes a token with probability (m(t) - m(s)) / m(t).

    A run ends early when no mask is left. With `reference_quirks` it goes through every step, and draws in float32,
    whose coarse numbers make rare tokens rarer (2409.02908).
    """

    settings_class: ClassVar[type[MDLMSettings]] = MDLMSettings

    def __init__(
        self, settings: MDLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = Float32Noise(noise)
        self.settings, self.adaptive = settings, not reference_quirks
        self.propose = AncestralPropose(settings.temperature, noise, ids.mask, reference_quirks=reference_quirks)
        self.select = SelectLikelier()

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler for passes over the canvases of a finished run."""
        sampler = super().for_rerun(settings)
        sampler.settings = of_run(cls.settings_class, settings)
        return sampler

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step, and the removal of noise; there are no blocks."""
        total = self.settings.steps + self.settings.noise_removal
        return one_block(total, prompt_length, positions, self.settings.gen_length)

    def times(self, plan: StepPlan) -> Times:
        """The noise of a step."""
        return times_of(self.settings, plan.index)

    def at(self, plan: StepPlan) -> None:
        """Take the step's noise level for the passes until the next step."""
        self.sigma = self.times(plan).sigma

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """All masks, of which `select` takes those whose draw is a token."""
        return eligible.sum(-1)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The noise of the step."""
        self.propose.times = self.times(plan)  # type: ignore[assignment]


ALGORITHM = Algorithm(
    "mdlm", MDLMSettings, MDLMSampler, answer_settings, BESIDE_MASK, corruption=LogLinearCorruption()
)
