"""Tiny random models for tests, of this library and of code that uses it."""

import lazy_loader

# Lazily, because the pytest plugin beside it is imported in every pytest run of an environment.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
