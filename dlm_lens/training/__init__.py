"""Training: from an AR checkpoint or from nothing to a masked DLM, with or without a sink token.

Public names load on first use.
"""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
