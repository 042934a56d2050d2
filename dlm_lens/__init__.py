"""Mechanistic interpretability of diffusion language models.

The most used names are here, all others in their packages: `dlm_lens.sinks`, `dlm_lens.probes`,
`dlm_lens.recording`, ... Names load on first use: importing this package loads neither torch nor a host.
"""

from typing import Any

from dlm_lens.public_names import SEARCHED, attach_names, no_name

_listed, __dir__, __all__ = attach_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in __all__ or name.startswith("_"):
        return _listed(name)
    for package in map(_listed, SEARCHED):
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(no_name(__name__, name))


def _version() -> str:
    """The version of the installed package: that of the tag it was built from (setuptools-scm)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("dlm-lens")
    except PackageNotFoundError:  # a copy of the sources on the path, not installed
        return "0+unknown"
