"""Every figure and table of the papers as an experiment: listed, run, resumed and rendered by one runner."""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
