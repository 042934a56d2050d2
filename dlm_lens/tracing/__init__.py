"""nnsight host: `DiffusionLM`, and the denoising steps, attention and sampler of its traces."""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
