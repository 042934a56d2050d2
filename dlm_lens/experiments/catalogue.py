"""The experiments that there are: every module of a paper's folder that declares one."""

import ast
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

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


@dataclass(frozen=True)
class Declared:
    """What a file says of its experiment, read without running the file: no model library is imported.

    Args:
        module: to import for the experiment itself.
        name: on the command line.
        shows: paper and figure or table.
        title: what is measured.
    """

    module: str
    name: str
    shows: str
    title: str


@cache
def declared_experiments() -> tuple[Declared, ...]:
    """Name, source and title of every experiment, in the order of `list_experiments`."""
    found: list[Declared] = []
    for paper in PAPERS:
        package = f"dlm_lens.experiments.{paper}"
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(folder).glob("*.py")):
                found += _declared_in(file, f"{package}.{file.stem}")
    return tuple(found)


def _declared_in(file: Path, module: str) -> Iterator[Declared]:
    """The experiment that a file assigns to `EXPERIMENT`, if it does."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        named = any(isinstance(target, ast.Name) and target.id == "EXPERIMENT" for target in targets)
        if isinstance(node, ast.Assign) and named and isinstance(node.value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.value.keywords}
            texts = {name: ast.literal_eval(given[name]) for name in ("name", "shows", "title")}
            yield Declared(module, **texts)


def check_experiment(name: str) -> Declared:
    """What is declared of the experiment of that name.

    Raises:
        ValueError: there is none.
    """
    known = {one.name: one for one in declared_experiments()}
    if name not in known:
        near = get_close_matches(name, known, 3) or sorted(known)
        raise ValueError(f"no experiment is named {name!r}; perhaps {', '.join(near)} (`dlm-lens experiment list`)")
    return known[name]


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    experiment: Experiment = import_module(check_experiment(name).module).EXPERIMENT
    return experiment
