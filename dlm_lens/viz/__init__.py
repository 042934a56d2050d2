"""Pictures: figures for papers, circuitsvis views for notebooks, and the report, one function each.

A figure is a matplotlib `Figure` and touches no global state: save it with `figure.savefig(path,
bbox_inches="tight")`. A view has `save(path)`, and shows itself in a notebook. A file of `figures` or `views` that
declares a picture (`plot_registry.plot`) needs no entry here: its function is found by its name.
"""

from typing import Any

from dlm_lens.public_names import attach_names

_exported, __dir__, __all__ = attach_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _exported(name)
    except AttributeError:
        from importlib import import_module

        from dlm_lens.viz.plot_registry import plots

        for one in () if name.startswith("_") else plots().values():
            if one.name.replace("-", "_") == name:
                return getattr(import_module(one.module), name)
        raise
