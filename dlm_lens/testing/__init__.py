"""Tiny random models for tests, of this library and of those who build on it."""

from dlm_lens.testing.models import tiny

__all__ = ["tiny"]
