"""Every figure and table of the papers as an experiment: listed, run, resumed and rendered by one runner."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
