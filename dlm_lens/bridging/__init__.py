"""TransformerLens host: `bridge`, a step axis for its hooks and caches, and our families in `boot_transformers`."""

from dlm_lens.adapters.registry import families
from dlm_lens.bridging.architectures import register_architectures
from dlm_lens.bridging.boot_transformers import teach_boot_transformers
from dlm_lens.bridging.model import DiffusionBridge, bridge
from dlm_lens.bridging.recorder import BridgeRecorder
from dlm_lens.bridging.step_cache import StepCache
from dlm_lens.bridging.steps import StepPoint

families()  # boot_transformers asks AutoConfig, which must know our model types
register_architectures()
teach_boot_transformers()

__all__ = ["BridgeRecorder", "DiffusionBridge", "StepCache", "StepPoint", "bridge"]
