from .checkpoint_check import ReferenceLogits as ReferenceLogits
from .checkpoint_check import check_checkpoint as check_checkpoint
from .evaluation import Evaluation as Evaluation
from .evaluation import Score as Score
from .evaluation import evaluate as evaluate
from .evaluation import shipped_tasks as shipped_tasks
from .harness import HarnessLM as HarnessLM
from .presets import Preset as Preset
from .presets import find_preset as find_preset
from .presets import list_presets as list_presets
from .request_recordings import RecordSettings as RecordSettings
from .score_differences import score_differences as score_differences
from .settings import GenerationSettings as GenerationSettings
from .settings import LikelihoodSettings as LikelihoodSettings

__all__ = [
    "Evaluation",
    "GenerationSettings",
    "HarnessLM",
    "LikelihoodSettings",
    "Preset",
    "RecordSettings",
    "ReferenceLogits",
    "Score",
    "check_checkpoint",
    "evaluate",
    "find_preset",
    "list_presets",
    "score_differences",
    "shipped_tasks",
]
