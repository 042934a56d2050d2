"""Model families: checkpoints of every masked DLM and AR baseline as native transformers models."""

from dlm_lens.adapters.loading import load
from dlm_lens.adapters.mmada import ImageLayout
from dlm_lens.adapters.registry import Family, embedded_models, families, family_of

__all__ = ["Family", "ImageLayout", "embedded_models", "families", "family_of", "load"]
