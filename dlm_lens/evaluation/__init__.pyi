from .harness import HarnessLM as HarnessLM
from .presets import Preset as Preset
from .presets import find_preset as find_preset
from .presets import list_presets as list_presets
from .recorded import RecordSettings as RecordSettings
from .run_tasks import Evaluation as Evaluation
from .run_tasks import Score as Score
from .run_tasks import evaluate as evaluate
from .run_tasks import shipped_tasks as shipped_tasks
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
