from .diffusion_lm import DiffusionLM as DiffusionLM
from .self_check import SelfCheckError as SelfCheckError
from .steps import Step as Step
from .steps import Steps as Steps
