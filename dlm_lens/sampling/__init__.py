"""Denoising: the families' own samplers, row by row, with everything that happened kept."""

from dlm_lens.sampling.comparing import Comparison, compare
from dlm_lens.sampling.denoising import denoise
from dlm_lens.sampling.hooking import HookRunner, collecting_columns
from dlm_lens.sampling.host import Follower, Host
from dlm_lens.sampling.image_generation import ImageTokens, generate_image_tokens
from dlm_lens.sampling.likelihood import log_likelihood
from dlm_lens.sampling.likelihood_result import LogLikelihood
from dlm_lens.sampling.network import CanvasLogits, NonFiniteLogitsError
from dlm_lens.sampling.result import Denoised
from dlm_lens.sampling.resuming import FinishedStep, Resumption, RunState
from dlm_lens.sampling.sampler import Proposal, Sampler, StepPlan
from dlm_lens.sampling.stored import StoredRun

__all__ = [
    "CanvasLogits",
    "Comparison",
    "Denoised",
    "FinishedStep",
    "Follower",
    "HookRunner",
    "Host",
    "ImageTokens",
    "LogLikelihood",
    "NonFiniteLogitsError",
    "Proposal",
    "Resumption",
    "RunState",
    "Sampler",
    "StepPlan",
    "StoredRun",
    "collecting_columns",
    "compare",
    "denoise",
    "generate_image_tokens",
    "log_likelihood",
]
