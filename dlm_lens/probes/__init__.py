"""Probes of finished runs: norms of sinks' values, lenses per step, and what hooks change."""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
