"""Recording: statistics of attention at every step of a run, without patterns."""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
