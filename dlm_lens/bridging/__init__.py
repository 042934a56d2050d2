"""TransformerLens host: `bridge`, hooks and caches with a step axis, and our families in `boot_transformers`.

Importing this package registers the families with TransformerLens, so its names are not loaded lazily.
"""

from dlm_lens.adapters.registry import families
from dlm_lens.bridging.architectures import register_architectures, register_embedded_models
from dlm_lens.bridging.bridge_builder import bridge
from dlm_lens.bridging.diffusion_bridge import DiffusionBridge
from dlm_lens.bridging.recorder import BridgeRecorder
from dlm_lens.bridging.step_cache import StepCache
from dlm_lens.bridging.step_hooks import StepPoint

families()  # registers our model types with AutoConfig, which boot_transformers reads
register_architectures()
register_embedded_models()

__all__ = ["BridgeRecorder", "DiffusionBridge", "StepCache", "StepPoint", "bridge"]
