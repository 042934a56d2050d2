"""Tiny random models for tests, of this library and of code that uses it."""

from dlm_lens.public_names import attach_names

# Lazily, because the pytest plugin beside it is imported in every pytest run of an environment.
__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
