from . import adapters as adapters
from . import attention as attention
from . import hooks as hooks
from . import sampling as sampling
from . import sinks as sinks
from . import testing as testing
from . import tracing as tracing
from . import viz as viz
from .adapters import families as families
from .adapters import load as load
from .sampling import Denoised as Denoised
from .sampling import LogLikelihood as LogLikelihood
from .sampling import denoise as denoise
from .sampling import log_likelihood as log_likelihood
from .sinks import AboveMean as AboveMean
from .sinks import AboveStd as AboveStd
from .sinks import Received as Received
from .sinks import Share as Share
from .sinks import Sinks as Sinks
from .sinks import TopK as TopK
from .sinks import find_sinks as find_sinks
from .sinks import received_over_steps as received_over_steps
from .tracing import DiffusionLM as DiffusionLM

__version__: str
