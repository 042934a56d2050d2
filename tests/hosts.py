"""Tests that need nnsight or TransformerLens where one is not installed: they are skipped with that reason.

Whether a test needs one is seen when it imports it, so that no test says it. In CI (the variable CI is "true", as
.ci/run sets it) nothing is skipped: there a host that is not installed is an error.
"""

import os
from importlib.util import find_spec

HOSTS = {"nnsight": "nnsight", "transformer_lens": "transformer-lens"}
"""Modules and the packages that bring them."""


def left_out(module: str) -> bool:
    """Whether what needs this host is skipped: it is not installed, and this is not CI."""
    return os.environ.get("CI") != "true" and find_spec(module) is None


def missing_host(error: BaseException | None) -> str | None:
    """Why a test that ended with `error` is skipped: a host that it imports is `left_out`; else None."""
    while error is not None:
        name = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in HOSTS and left_out(name):
            return f"{HOSTS[name]} is not installed; pip install {HOSTS[name]}"
        error = error.__cause__ or error.__context__
    return None
