"""Mechanistic interpretability of diffusion language models.

The most used names are here, all others in their packages: `dlm_lens.sinks`, `dlm_lens.probes`,
`dlm_lens.recording`, ... Names load on first use: importing this package loads neither torch nor a host.
"""

from typing import Any

import lazy_loader

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_SEARCHED = ("recording", "sinks", "probes", "sampling")
"""Packages whose other public names are found here too, for notebooks: `dl.eps_sweep` is `dl.sinks.eps_sweep`."""

_OTHERS = ("hooks", "viz", "training", "evaluation", "features", "tracing", "adapters", "testing")
"""Packages of which an error says that they have a name."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in __all__ or name.startswith("_"):
        return _listed(name)
    for package in map(_listed, _SEARCHED):
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(_no_name(name))


def _no_name(name: str) -> str:
    """What the error of an unknown name says: where it is, or which names are like it."""
    import difflib

    places = {one: f"dlm_lens.{one}" for one in __all__}
    for package in (*_SEARCHED, *_OTHERS):
        for one in _listed(package).__all__:
            places.setdefault(one, f"dlm_lens.{package}.{one}")
    if name in places:
        return f"dlm_lens has no {name!r}; it is {places[name]}"
    close = ", ".join(places[one] for one in difflib.get_close_matches(name, places))
    known = f"there is {close}" if close else "dir(dlm_lens) lists its names and packages"
    return f"dlm_lens has no {name!r}; {known}"


def _version() -> str:
    """The version of the installed package: that of the tag it was built from (setuptools-scm)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dlm-lens")
    except PackageNotFoundError:  # a copy of the sources on the path, not installed
        return "0+unknown"
