"""Attention sinks: received attention, the rules that call a column a sink, and the paths of sinks over steps.

Names load on first use: importing this package loads no torch.
"""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
