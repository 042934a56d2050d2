"""Sparse autoencoders: the features of an activation, and the readers of their checkpoints."""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
