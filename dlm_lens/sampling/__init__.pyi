from .algorithm_registry import Algorithm as Algorithm
from .algorithm_registry import algorithms as algorithms
from .comparison import Comparison as Comparison
from .comparison import ComparisonDifference as ComparisonDifference
from .comparison import compare as compare
from .denoising import denoise as denoise
from .denoising_run import DenoisingRun as DenoisingRun
from .denoising_run import Proposal as Proposal
from .denoising_run import StepPlan as StepPlan
from .likelihood.estimates import LogLikelihood as LogLikelihood
from .likelihood.estimates import log_likelihood as log_likelihood
from .network import CanvasLogits as CanvasLogits
from .network import NonFiniteLogitsError as NonFiniteLogitsError
from .observers import FinishedStep as FinishedStep
from .observers import HookRunner as HookRunner
from .observers import Resumption as Resumption
from .observers import RunObserver as RunObserver
from .observers import RunState as RunState
from .observers import StepObserver as StepObserver
from .observers import collecting_columns as collecting_columns
from .run_parts import RunPart as RunPart
from .run_parts import part_of_run as part_of_run
from .samplers.base import Sampler as Sampler
from .samplers.image_tokens import ImageTokens as ImageTokens
from .samplers.image_tokens import generate_image_tokens as generate_image_tokens
from .setting_meanings import SamplerSetting as SamplerSetting
from .setting_meanings import SamplerSettings as SamplerSettings
from .setting_meanings import sampler_settings as sampler_settings
from .stored_run import StoredCanvases as StoredCanvases
from .stored_run import StoredRun as StoredRun

__all__ = [
    "Algorithm",
    "CanvasLogits",
    "Comparison",
    "ComparisonDifference",
    "DenoisingRun",
    "FinishedStep",
    "HookRunner",
    "ImageTokens",
    "LogLikelihood",
    "NonFiniteLogitsError",
    "Proposal",
    "Resumption",
    "RunObserver",
    "RunPart",
    "RunState",
    "Sampler",
    "SamplerSetting",
    "SamplerSettings",
    "StepObserver",
    "StepPlan",
    "StoredCanvases",
    "StoredRun",
    "algorithms",
    "collecting_columns",
    "compare",
    "denoise",
    "generate_image_tokens",
    "log_likelihood",
    "part_of_run",
    "sampler_settings",
]
