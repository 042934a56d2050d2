"""Mechanistic interpretability of diffusion language models.

The names of the first page are here, all others in their rooms: `dlm_lens.sinks`, `dlm_lens.probes`,
`dlm_lens.recording`, ... Names load on first use: importing this package loads neither torch nor a host.
"""

from typing import Any

import lazy_loader

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_SEARCHED = ("recording", "sinks", "probes", "sampling")
"""Rooms whose other public names are found here too, for notebooks: `dl.eps_sweep` is `dl.sinks.eps_sweep`."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in __all__ or name.startswith("_"):
        return _listed(name)
    for room in map(_listed, _SEARCHED):
        if name in room.__all__:
            return getattr(room, name)
    raise AttributeError(f"dlm_lens has no {name!r}; its public names are in dir(dlm_lens) and in its rooms")


def _version() -> str:
    """The version of the installed package: that of the tag it was built from (setuptools-scm)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dlm-lens")
    except PackageNotFoundError:  # a copy of the sources on the path, not installed
        return "0+unknown"
