"""Sparse autoencoders: the features of an activation, and the readers of their checkpoints."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
