"""`check_types`: the values of a settings dataclass are of the types that its fields say."""

from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from dlm_lens.printable import shown

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None",
         Path: "a path"}  # fmt: skip


def check_types(settings: Any, prefix: str = "") -> None:
    """Raise where a field of a dataclass has a value of another type; a config file is checked before it is built.

    Args:
        settings: the dataclass. Fields of a Literal have their own check, and one of another kind has none.
        prefix: of the fields' names, such as "data.".

    Raises:
        ValueError: naming the field, its value and what it must be.
    """
    for name, kind in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(value, kind):
            raise ValueError(f"{prefix}{name} is {shown(value)}; it must be {_said(kind)}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        first = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(each, first) for each in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in NAMES or is_dataclass(kind) else True


def _said(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_said(each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, and each part {_said(get_args(kind)[0])}"
    return NAMES.get(kind) or f"a {kind.__name__}"
