"""Training: from an AR checkpoint or from nothing to a masked DLM, with or without a sink token.

Public names load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
