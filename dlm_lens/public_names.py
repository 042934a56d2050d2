"""`attach_names`: public names of a package load on first use; the error of an unknown one lists similar names."""

import os
from collections.abc import Callable
from typing import Any

import lazy_loader

SEARCHED = ("recording", "sinks", "probes", "sampling")
"""Packages whose other public names are found in `dlm_lens` too, for notebooks: `dl.eps_sweep` is
`dl.sinks.eps_sweep`."""

_OTHERS = ("hooks", "viz", "training", "evaluation", "features", "tracing", "adapters", "testing")
"""Packages of which an error says that they have a name."""

_KNOWN_AS = {
    "add_hook": "hooks.attach_hooks",
    "from_pretrained": "load",
    "generate": "denoise",
    "HookedTransformer": "bridge",
    "LanguageModel": "DiffusionLM",
    "TransformerBridge": "bridge",
    "attribute": "probes.attribution_patching",
    "clock": "probes.denoising_clock",
    "feature_activations": "recording.FeatureActivations",
    "load_features": "features.load_sae",
}
"""Names of the hosts, and words for what has another name here -> the name here."""


def attach_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the stub beside its file.

    Args:
        package: its `__name__`.
        file: its `__file__`.
    """
    folder = os.path.dirname(file)  # pathlib takes a part of the time in which this package is imported
    listed, directory, names = lazy_loader.attach_stub(package, file)

    def find(name: str) -> Any:
        """The public name; a private one is looked up as Python does, which asks for many."""
        if name in names or name.startswith("_"):
            return listed(name)
        path = os.path.join(folder, name)
        if name not in _KNOWN_AS and (os.path.exists(path) or os.path.exists(f"{path}.py")):
            # What `from package import module` meets first: no place for a search through all packages.
            raise AttributeError(f"{package} has no {name!r} yet; import {package}.{name}")
        raise AttributeError(no_name(package, name))

    return find, directory, names


def no_name(package: str, name: str) -> str:
    """What the error of an unknown name says: where it is, or which names are like it."""
    if name in _KNOWN_AS:
        return f"{package} has no {name!r}; here it is dlm_lens.{_KNOWN_AS[name]}"
    import difflib
    from importlib import import_module

    places: dict[str, str] = {}
    for one in (package, "dlm_lens", *(f"dlm_lens.{other}" for other in (*SEARCHED, *_OTHERS))):
        for public in import_module(one).__all__:
            places.setdefault(public, f"{one}.{public}")
    if name in places:
        return f"{package} has no {name!r}; it is {places[name]}"
    close = ", ".join(places[one] for one in difflib.get_close_matches(name, places))
    known = f"there is {close}" if close else f"dir({package}) lists its names and packages"
    return f"{package} has no {name!r}; {known}"
