"""Model families: checkpoints of LLaDA, sink-token Qwen and AR baselines as native transformers models."""

from dlm_lens.adapters.loading import load
from dlm_lens.adapters.registry import Family, embedded_models, families, family_of

__all__ = ["Family", "embedded_models", "families", "family_of", "load"]
