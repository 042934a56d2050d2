from .harness import HarnessLM as HarnessLM
from .preset import Preset as Preset
from .presets import find_preset as find_preset
from .presets import list_presets as list_presets
from .recorded import RecordSettings as RecordSettings
from .result import Evaluation as Evaluation
from .result import Score as Score
from .running import evaluate as evaluate
from .running import shipped_tasks as shipped_tasks
from .settings import GenerationSettings as GenerationSettings
from .settings import LikelihoodSettings as LikelihoodSettings

__all__ = [
    "Evaluation",
    "GenerationSettings",
    "HarnessLM",
    "LikelihoodSettings",
    "Preset",
    "RecordSettings",
    "Score",
    "evaluate",
    "find_preset",
    "list_presets",
    "shipped_tasks",
]
