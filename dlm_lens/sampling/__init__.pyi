from .comparing import Comparison as Comparison
from .comparing import compare as compare
from .denoising import denoise as denoise
from .hooking import HookRunner as HookRunner
from .hooking import collecting_columns as collecting_columns
from .host import Follower as Follower
from .host import Host as Host
from .image_generation import ImageTokens as ImageTokens
from .image_generation import generate_image_tokens as generate_image_tokens
from .likelihood import log_likelihood as log_likelihood
from .likelihood_result import LogLikelihood as LogLikelihood
from .network import CanvasLogits as CanvasLogits
from .network import NonFiniteLogitsError as NonFiniteLogitsError
from .result import Denoised as Denoised
from .resuming import FinishedStep as FinishedStep
from .resuming import Resumption as Resumption
from .resuming import RunState as RunState
from .sampler import Proposal as Proposal
from .sampler import Sampler as Sampler
from .sampler import StepPlan as StepPlan
from .stored import StoredRun as StoredRun

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
