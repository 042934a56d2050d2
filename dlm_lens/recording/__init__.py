"""Recording: statistics of attention at every step of a run, without patterns."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
