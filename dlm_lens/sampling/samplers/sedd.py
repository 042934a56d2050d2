"""SEDD's sampler: each mask becomes a token at the rate that the network gives by the ratios (scores)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of
from dlm_lens.adapters.families.sedd import log_scores
from dlm_lens.sampling.algorithm_registry import BESIDE_MASK, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.network import Rows
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.mdlm import AncestralPropose, MDLMSampler, MDLMSettings, Times, log_probabilities
from dlm_lens.sampling.settings import SpecialIds, answer_settings


@dataclass(frozen=True)
class SEDDSettings(MDLMSettings):
    """Settings of SEDD's `get_pc_sampler` (louaaron/Score-Entropy-Discrete-Diffusion, sampling.py).

    Args:
        predictor: "analytic" (Tweedie's tau-leaping, the original's run_sample.py) or "euler". With the forward
            process and the schedule of the released models both unmask with the same probabilities, so that only
            the rounding of the original's float32 differs, with `reference_quirks`.
        noise_removal: one more step, which draws a token at every mask that is left.
    """

    predictors: ClassVar[tuple[str, ...]] = ("analytic", "euler")
    predictor: str = "analytic"


def times_of(settings: SEDDSettings, index: int) -> Times:
    """The noise of a step at time t of the original's float32 schedule, and the share u = d / t that it unmasks.

    From t to t - d the analytic predictor writes token y with probability (exp(sigma(t) - sigma(t - d)) - 1) s_y,
    Euler's with d sigma'(t) s_y (2310.16834, section 4.1). With s_y = q_y / (exp(sigma(t)) - 1) and the schedule
    sigma(t) = -ln(1 - (1 - 1e-3) t) both are q_y d / t. The removal of noise, the last step, has u = 1.
    """
    sigma, t = noise_at(settings, index)
    share = 1.0 if index == settings.steps else (1 - settings.eps) / settings.steps / float(t)
    return Times(float(sigma), share, 1 - share)


def noise_at(settings: SEDDSettings, index: int) -> tuple[Float[Tensor, "1"], Float[Tensor, "1"]]:
    """Sigma and t of a step, in float32 as the original computes them."""
    t = torch.linspace(1, settings.eps, settings.steps + 1, dtype=torch.float32)[index : index + 1]
    return sigma_of((1 - NOISE_EPS) * t), t


def normaliser(logits: Float[Tensor, "n d_vocab"], mask: int) -> Float[Tensor, "n"]:
    """Z, the sum of q_y = exp(logits_y) / N over the N tokens without [MASK]."""
    tokens = logits.index_fill(-1, torch.tensor([mask], device=logits.device), -torch.inf)
    return (tokens.logsumexp(-1) - math.log(logits.shape[-1] - 1)).exp()


def original_weights(
    logits: Float[Tensor, "n d_vocab"], mask: int, settings: SEDDSettings, index: int
) -> Float[Tensor, "n d_vocab"]:
    """The weights from which the original draws at masked positions, with its dtypes and its order of operations.

    Scores have the logits' dtype and the rest is float32. In bfloat16 the analytic predictor's weight of [MASK], a
    small difference of larger numbers, can be wrong by a tenth. In the last step the weight of [MASK], which the
    original leaves out, is 0.
    """
    sigma, t = (one.to(logits.device) for one in noise_at(settings, index))
    last, step = index == settings.steps, (1 - settings.eps) / settings.steps
    masks = torch.full_like(logits[:, 0], mask, dtype=torch.long)
    scores = log_scores(logits, masks, sigma).exp()
    here = torch.nn.functional.one_hot(masks, logits.shape[-1])
    if settings.predictor == "euler" and not last:
        rates = scores * (1 - here)
        rates[:, mask] = -rates.sum(-1)
        return here + step * (1 - NOISE_EPS) / (1 - (1 - NOISE_EPS) * t) * rates
    change = sigma if last else sigma - sigma_of((1 - NOISE_EPS) * (t - step))
    staggered = (scores * change.exp()).to(scores.dtype)
    staggered[:, mask] += (1 - change.exp()) * scores.sum(-1)
    weights = staggered * ((-change).exp() * here + (1 - (-change).exp()))
    return weights * (1 - here) if last else weights


class SEDDPropose(AncestralPropose):
    """x0 drawn from p(x0) as MDLM's, with weights that need not sum to 1.

    The network's ratios give q_y = exp(logits_y) / N, of which p = q / Z, Z = sum of q, is a distribution. A step
    that unmasks a share u of the tokens gives token y the weight u q_y and [MASK] 1 - u Z, at least 0: a mask is
    written with probability u Z. After training Z is near 1.

    Attributes:
        index: of the step.
    """

    mask: int
    index = 0

    def __init__(self, settings: SEDDSettings, noise: Noise, mask: int, *, reference_quirks: bool) -> None:
        super().__init__(settings.temperature, noise, mask, reference_quirks=reference_quirks)
        self.settings = settings

    @property
    def last(self) -> bool:
        """Whether the step is the removal of noise, which writes every mask."""
        return self.index == self.settings.steps

    def weights(
        self, logits: Float[Tensor, "evaluated d_vocab"]
    ) -> tuple[Float[Tensor, "evaluated d_vocab"], Float[Tensor, "#evaluated"] | float]:
        """Weights u q of the tokens and 1 - u Z of [MASK], in float64; with `reference_quirks` the original's."""
        if self.reference_quirks:
            weights = original_weights(self.tempered(logits), self.mask, self.settings, self.index)
            return weights, weights[:, self.mask].clamp(min=0)
        likely = self.probabilities(logits)
        if self.last:
            return likely, 0.0
        # Within what a float64 holds, so that p decides between tokens whatever Z is.
        share = self.times.unmasked * normaliser(logits.double(), self.mask).clamp(1e-300, 1e300)
        return likely * share[:, None], (1 - share).clamp(min=0)

    def tempered(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of p^(1 / temperature) with the same Z; the original has a temperature of 1."""
        if self.temperature == 1:
            return logits
        likely = log_probabilities(logits.float(), self.mask, self.temperature)
        total = normaliser(logits.float(), self.mask)[:, None] * (logits.shape[-1] - 1)
        return (likely + total.log()).to(logits.dtype)

    def uniform(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Rows:
        """A number for every evaluated position and column; none for [MASK], the last one, in the last step."""
        return super().uniform(evaluated, eligible, width - self.last)

    def drawn(
        self, logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n numbers"] | None
    ) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """X0 and its confidence, with 1/e, no noise, for [MASK] in the last step."""
        if self.last and uniform is not None:
            uniform = torch.nn.functional.pad(uniform, (0, 1), value=torch.e**-1)
        return super().drawn(logits, uniform)


class SEDDSampler(MDLMSampler):
    """Tau-leaping of the reverse process of SEDD (2310.16834, section 4.1).

    Each mask becomes token y with probability u q_y, u = d / t of a step from t to t - d (`SEDDPropose`); the last
    step draws from p at every mask that is left. A run ends early when no mask is left. With `reference_quirks` it
    goes through every step, and draws in float32.
    """

    settings: SEDDSettings
    settings_class: ClassVar[type[MDLMSettings]] = SEDDSettings

    def __init__(
        self, settings: SEDDSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        own: Any = self.propose
        self.propose = SEDDPropose(settings, own.noise, own.mask, reference_quirks=reference_quirks)

    def times(self, plan: StepPlan) -> Times:
        """The noise of a step."""
        return times_of(self.settings, plan.index)

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The step and its noise."""
        super().prepare(masked, plan)
        self.propose.index = plan.index  # type: ignore[assignment]


def score_entropy(
    logits: Float[Tensor, "scored d_vocab"], where: Int[Tensor, "token"], targets: Int[Tensor, "token"]
) -> Float[Tensor, "token"]:
    """-ln q(x0) + Z - 1 of masked tokens, whose weighted mean is the bound of SEDD (2310.16834, theorem 3.6).

    The score entropy of a [MASK] is r (-ln q(x0) + Z - 1), r = 1 / (exp(sigma) - 1), weighted by sigma'(t): for the
    log-linear schedule r sigma' = 1 / t. It is minus the log-probability, -ln p(x0), and Z - 1 - ln Z, which is 0
    where Z, the sum of q, is 1.
    """
    scale = math.log(logits.shape[-1] - 1)
    total = (logits.logsumexp(-1) - scale).exp()
    return scale - logits[where, targets] + total[where] - 1


ALGORITHM = Algorithm(
    "sedd",
    SEDDSettings,
    SEDDSampler,
    answer_settings,
    BESIDE_MASK,
    corruption=LogLinearCorruption(stratified=False),
    loss=score_entropy,
)
