"""UDLM's sampler: Duo's ancestral sampling of uniform noise, and the float32 numbers of the authors' code."""

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import NOISE_EPS, sigma_of
from dlm_lens.sampling.algorithm_registry import OF_THE_TEXT, Algorithm
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.likelihood.nelbo import UniformCorruption
from dlm_lens.sampling.noise import Noise, SharedNoise
from dlm_lens.sampling.samplers.duo import DuoPropose, DuoSampler, DuoSettings
from dlm_lens.sampling.samplers.mdlm import Float32Noise
from dlm_lens.sampling.samplers.uniform_posterior import Levels
from dlm_lens.sampling.settings import SpecialIds, random_settings


def reference_levels(settings: DuoSettings, index: int) -> Levels:
    """The noise of a step as the original computes it, in float32 (diffusion.py, `_diffusion_sample`).

    With t from linspace(1, eps, steps + 1) and s = t - (1 - eps) / steps, alpha = 1 - (1 - exp(-sigma)).
    """
    t = settings.times(torch.float32)[index]
    s = t - (1 - settings.eps) / settings.steps
    sigmas = [sigma_of((1 - NOISE_EPS) * time) for time in (t, s)]
    alpha_t, alpha_s = (1 - (1 - torch.exp(-sigma)) for sigma in sigmas)
    return Levels(float(sigmas[0]), alpha_t, alpha_s)


def reference_posterior(
    likely: Float[Tensor, "n d_vocab"], seen: Int[Tensor, "n"], levels: Levels
) -> Float[Tensor, "n d_vocab"]:
    """`posterior`, divided by its sum, with the products of the original's `_compute_posterior`.

    There it is float32, as the random numbers are, so that rounding decides tokens: several numbers may be equal.

    Args:
        likely: x, the network's probabilities of the text's token.
        seen: x_t.
        levels: of the step.
    """
    alpha_t, alpha_s = levels.alpha_t.to(likely), levels.alpha_s.to(likely)
    size, ratio, here = likely.shape[-1], alpha_t / alpha_s, seen[:, None]
    own = likely.gather(-1, here)
    rest = (alpha_s - alpha_t) * likely
    kept = torch.zeros_like(likely).scatter_(-1, here, alpha_t * size * own + (ratio - alpha_t))
    noise = (1 - ratio) * (1 - alpha_s) * (likely.new_ones(()) / size)
    return (kept + rest + noise) / (alpha_t * size * own + (1 - alpha_t))


class UDLMPropose(DuoPropose):
    """x_s of Duo; with `reference_quirks` from numbers in float32."""

    def probabilities(self, logits: Float[Tensor, "evaluated d_vocab"]) -> Float[Tensor, "evaluated d_vocab"]:
        """P(x_0) within the nucleus, in float64; the original's in the dtype of its log-softmax."""
        return self.logs(logits).exp() if self.reference_quirks else super().probabilities(logits)

    def weights(
        self, likely: Float[Tensor, "evaluated d_vocab"], seen: Int[Tensor, "evaluated"]
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Of x_s."""
        if not self.reference_quirks:
            return super().weights(likely, seen)
        return reference_posterior(likely, seen, self.levels)


class UDLMSampler(DuoSampler):
    """Ancestral sampling of uniform noise (2412.10193; diffusion.py, `_ddpm_denoise`): in exact numbers Duo's.

    With `reference_quirks` the schedule, the probabilities and the draws are in float32, as in the original with
    `use_cache` and `use_float64` off, and there is the original's one stream.
    """

    proposing: ClassVar[type[DuoPropose]] = UDLMPropose

    def __init__(
        self, settings: DuoSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        if reference_quirks and isinstance(noise, SharedNoise):
            noise = Float32Noise(noise)
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)

    def levels(self, plan: StepPlan) -> Levels:
        """The noise of a step."""
        if self.reference_quirks and plan.index < self.settings.steps:
            return reference_levels(self.settings, plan.index)
        return super().levels(plan)


ALGORITHM = Algorithm(
    "udlm", DuoSettings, UDLMSampler, random_settings, OF_THE_TEXT, corruption=UniformCorruption()
)
