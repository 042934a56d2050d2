"""Mechanistic interpretability of diffusion language models.

Public names load on first use: importing this package loads neither torch nor a host.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
