"""Attention sinks: received attention, the rules that call a column a sink, and the paths of sinks over steps.

Names load on first use: importing this package loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
