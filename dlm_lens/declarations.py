"""Declarations of extensions, found by their file: read from the source without importing it, or imported.

Families, samplers, reducers, detectors, figures and experiments are each a file of one folder that declares what it
holds. A command line is checked before torch loads, so that most declarations are read from the source: calls with
literal arguments.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Declaration:
    """A call at the top level of a file: assigned, alone or in a tuple, or decorating a function.

    Args:
        file: the file.
        module: its module.
        callee: the name that is called.
        assigned: the name that the call is assigned to; empty for a decorator.
        function: the function that the call decorates; empty for an assignment.
        call: the call.
    """

    file: Path
    module: str
    callee: str
    assigned: str
    function: str
    call: ast.Call

    def arguments(self, *names: str) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments; with `names` only these keyword arguments.

        Raises:
            ValueError: one is not a literal, or a name is missing.
        """
        given = {str(keyword.arg): keyword.value for keyword in self.call.keywords}
        try:
            chosen = {name: given[name] for name in names} if names else given
            positional = [] if names else [ast.literal_eval(value) for value in self.call.args]
            return positional, {name: ast.literal_eval(value) for name, value in chosen.items()}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(self.error(error)) from None

    def error(self, why: object) -> str:
        """A sentence that names the file, the line and what a declaration takes."""
        return f"{self.file}, line {self.call.lineno}: {why}; {self.callee} takes arguments that are literals"


def declarations(folder: Path, package: str) -> Iterator[Declaration]:
    """The declarations in the files of a folder, in alphabetical order of the files; nothing is imported."""
    for file in sorted(folder.glob("*.py")):
        module = f"{package}.{file.stem}"
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found, assigned, function = node.decorator_list, "", node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assigned = next((each.id for each in targets if isinstance(each, ast.Name)), "")
                found = list(node.value.elts) if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
                function = ""
            else:
                continue
            for call in found:
                if isinstance(call, ast.Call):
                    callee = getattr(call.func, "id", getattr(call.func, "attr", ""))
                    yield Declaration(file, module, callee, assigned, function, call)


def defined_in(package: str, name: str, kind: type[Kind]) -> list[Kind]:
    """The values called `name` in the modules of a package, which are imported, in alphabetical order."""
    modules = [import_module(f"{package}.{each.name}") for each in iter_modules(import_module(package).__path__)]
    values = [getattr(module, name, None) for module in modules]
    return [value for value in values if isinstance(value, kind)]


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def module(self) -> str: ...


Named = TypeVar("Named", bound=_Named)


def by_name(entries: Iterable[Named], what: str) -> MappingProxyType[str, Named]:
    """The entries by their names, in alphabetical order.

    Args:
        entries: what was declared.
        what: what errors call them, in the plural.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, Named] = {}
    for entry in entries:
        if entry.name in found:
            raise ValueError(f"two {what} are named {entry.name!r}: {found[entry.name].module}, {entry.module}")
        found[entry.name] = entry
    return MappingProxyType(dict(sorted(found.items())))
