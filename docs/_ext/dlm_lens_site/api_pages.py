"""The reference: one page per room, from the names that the room exports."""

import inspect
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from dlm_lens_site.files import ROOT

FIRST_ROOMS = ("adapters", "sampling", "tracing", "bridging", "hooks", "recording", "sinks", "probes", "viz")
"""In the order in which a reader needs them; the others follow by name."""


@cache
def rooms() -> dict[str, ModuleType]:
    """The rooms with public names."""
    found = sorted(path.parent.name for path in (ROOT / "dlm_lens").glob("*/__init__.py"))
    names = [*FIRST_ROOMS, *(name for name in found if name not in FIRST_ROOMS)]
    modules = {name: import_module(f"dlm_lens.{name}") for name in names}
    return {name: module for name, module in modules.items() if getattr(module, "__all__", ())}


@cache
def public_names() -> dict[str, str]:
    """Where each object is defined -> the name under which the reference has it."""
    found: dict[str, str] = {}
    for room, module in rooms().items():
        for name in module.__all__:
            value = getattr(module, name)
            if _kind(value) is not None:
                found.setdefault(f"{value.__module__}.{value.__qualname__}", f"dlm_lens.{room}.{name}")
    return found


@cache
def documented() -> dict[str, list[str]]:
    """Short name -> full names in the reference: `AboveMean` -> ["dlm_lens.sinks.AboveMean"]."""
    found: dict[str, list[str]] = {}
    for full in public_names().values():
        found.setdefault(full.rsplit(".", 1)[1], []).append(full)
    return found


def api_pages() -> dict[str, str]:
    """The pages, reStructuredText, by name."""
    pages = {f"api/{name}.rst": _room_page(name, module) for name, module in rooms().items()}
    return {"api/index.rst": _index(), **pages}


def _index() -> str:
    first = import_module("dlm_lens")
    known = {full for names in documented().values() for full in names}
    lines = [*_title("Python reference"), "``import dlm_lens as dl``; a room is a package of it.", ""]
    lines += _title("Names of the first page", "-")
    lines += [".. list-table::", "   :widths: 30 70", ""]
    for name in sorted(first.__all__, key=str.lower):
        value = getattr(first, name)
        if inspect.ismodule(value) or _kind(value) is None:
            continue
        full = public_names().get(f"{value.__module__}.{value.__qualname__}")
        link = f":py:obj:`dl.{name} <{full}>`" if full in known else f"``dl.{name}``"
        lines += [f"   * - {link}", f"     - {_summary(value)}"]
    lines += ["", *_title("Rooms", "-"), ".. list-table::", "   :widths: 30 70", ""]
    for name, module in rooms().items():
        lines += [f"   * - :doc:`dlm_lens.{name} <{name}>`", f"     - {_summary(module)}"]
    lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name in rooms()), ""]
    return "\n".join(lines)


def _room_page(room: str, module: ModuleType) -> str:
    lines = [*_title(f"dlm_lens.{room}"), _summary(module), ""]
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in sorted(module.__all__, key=str.lower):
        kind = _kind(getattr(module, name))
        full = public_names().get(_path(getattr(module, name))) if kind else None
        if kind and full == f"dlm_lens.{room}.{name}":
            groups[kind].append(name)
    for heading, names in groups.items():
        if names:
            lines += [*_title(heading, "-"), *_table(module, names), *_entries(module, names, heading)]
    constants = [name for name in module.__all__ if _kind(getattr(module, name)) is None]
    if constants:
        lines += _title("Constants", "-")
        for name in sorted(constants):
            lines += [f".. py:data:: dlm_lens.{room}.{name}", "", f"   ``{getattr(module, name)!r}``", ""]
    return "\n".join(lines)


def _entries(module: ModuleType, names: Iterable[str], heading: str) -> list[str]:
    directive = {"Functions": "autofunction", "Classes": "autoclass", "Errors": "autoexception"}[heading]
    lines = []
    for name in names:
        lines += [f".. {directive}:: {module.__name__}.{name}"]
        if heading != "Functions":
            lines += ["   :members:", "   :show-inheritance:"]
        lines += [""]
    return lines


def _table(module: ModuleType, names: Iterable[str]) -> list[str]:
    lines = [".. list-table::", "   :widths: 30 70", ""]
    for name in names:
        lines += [
            f"   * - :py:obj:`{name} <{module.__name__}.{name}>`",
            f"     - {_summary(getattr(module, name))}",
        ]
    return [*lines, ""]


def _kind(value: Any) -> str | None:
    if inspect.isclass(value):
        return "Errors" if issubclass(value, BaseException) else "Classes"
    return "Functions" if inspect.isroutine(value) else None


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _summary(value: Any) -> str:
    """The first paragraph of a docstring on one line."""
    from dlm_lens_site.docstrings import escaped

    return escaped(" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()))


def _title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]
