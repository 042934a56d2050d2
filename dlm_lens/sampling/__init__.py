"""Denoising: the families' own samplers, row by row, with everything that happened kept."""

from dlm_lens.sampling.denoising import denoise
from dlm_lens.sampling.image_generation import ImageTokens, generate_image_tokens
from dlm_lens.sampling.likelihood import log_likelihood
from dlm_lens.sampling.likelihood_result import LogLikelihood
from dlm_lens.sampling.network import NonFiniteLogitsError
from dlm_lens.sampling.result import Denoised
from dlm_lens.sampling.sampler import Proposal, Sampler, StepPlan

__all__ = [
    "Denoised",
    "ImageTokens",
    "LogLikelihood",
    "NonFiniteLogitsError",
    "Proposal",
    "Sampler",
    "StepPlan",
    "denoise",
    "generate_image_tokens",
    "log_likelihood",
]
