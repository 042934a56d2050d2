"""Probes of finished runs: norms of sinks' values, lenses per step, and what hooks change."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
