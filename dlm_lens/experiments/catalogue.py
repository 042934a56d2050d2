"""The experiments that there are: every module of a paper's folder that declares one."""

import pkgutil
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from dlm_lens.experiments.spec import Experiment

PAPERS = ("attention_sinks", "one_token")
"""Folders of experiments, one per paper."""


@cache
def list_experiments() -> tuple[Experiment, ...]:
    """All experiments, by paper and file name."""
    found: list[Experiment] = []
    for paper in PAPERS:
        name = f"dlm_lens.experiments.{paper}"
        if find_spec(name) is None:
            continue
        folder = import_module(name)
        for module in sorted(one.name for one in pkgutil.iter_modules(folder.__path__)):
            declared = getattr(import_module(f"{name}.{module}"), "EXPERIMENT", None)
            if isinstance(declared, Experiment):
                found.append(declared)
    return tuple(found)


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    known = {experiment.name: experiment for experiment in list_experiments()}
    if name not in known:
        near = get_close_matches(name, known, 3) or sorted(known)
        raise ValueError(f"no experiment is named {name!r}; perhaps {', '.join(near)} (`dlm-lens experiment list`)")
    return known[name]
