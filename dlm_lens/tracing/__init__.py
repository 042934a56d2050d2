"""nnsight host: `DiffusionLM`, and the denoising steps, attention and sampler of its traces."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
