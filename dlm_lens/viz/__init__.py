"""Pictures: figures for papers, circuitsvis views for notebooks, and the report, one function each.

A figure is a matplotlib `Figure` and touches no global state: save it with `figure.savefig(path,
bbox_inches="tight")`. A view has `save(path)`, and shows itself in a notebook.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
