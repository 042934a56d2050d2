"""nnsight with the denoising step: `DiffusionLM`, `tracer.steps`, attention and sampler as values to edit."""

from dlm_lens.tracing.model import DiffusionLM
from dlm_lens.tracing.self_check import SelfCheckError
from dlm_lens.tracing.steps import Step, Steps

__all__ = ["DiffusionLM", "SelfCheckError", "Step", "Steps"]
