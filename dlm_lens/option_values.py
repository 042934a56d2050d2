"""Values of command line options, read from text without torch: a wrong one is reported before it is imported."""

import ast
import difflib
import json
import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Never

from dlm_lens.printable import shown


def one_of(option: str, value: str, allowed: Iterable[str]) -> str:
    """The value of an option that must be one of a few words.

    Raises:
        ValueError: it is not.
    """
    names = list(allowed)
    if value not in names:
        near = difflib.get_close_matches(value, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{option} is {value!r}; {hint}it is one of {', '.join(names)}")
    return value


def words(option: str, text: str) -> list[str]:
    """Words separated by commas, such as toy_lists,toy_choice.

    Raises:
        ValueError: an empty word.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise ValueError(f"{option} is {text!r}; give words separated by commas")
    return found


def whole_number(option: str, text: str) -> int:
    """A whole number.

    Raises:
        ValueError: it is none.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give a whole number") from None


def whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas, such as 0,5,-1.

    Raises:
        ValueError: a part that is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers separated by commas, got {text!r}") from None


def index_or_mean(option: str, text: str) -> int | str:
    """The index of a layer or head, or "mean".

    Raises:
        ValueError: neither.
    """
    if text == "mean":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give an index, or mean") from None


def read_setting(text: str, example: str = "prompts=64") -> tuple[str, Any]:
    """A setting written as name=value; the value is JSON, a Python literal or plain text.

    Args:
        text: the setting.
        example: of one, for the error.

    Raises:
        ValueError: there is no "=", or the value is nested too deeply.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not a setting; write name=value, such as {example}")
    for read in (partial(json.loads, parse_constant=_no_number), ast.literal_eval):
        try:
            return name.strip(), read(value)
        except (ValueError, SyntaxError, TypeError):  # TypeError: a dictionary as a key
            continue
        except (RecursionError, MemoryError):
            raise ValueError(f"{text[:60]!r}... is nested too deeply for a setting; write a plain value") from None
    return name.strip(), value.strip()


def settings_of(texts: Iterable[str], example: str = "prompts=64") -> dict[str, Any]:
    """Several settings written as name=value, as `read_setting` reads each.

    Raises:
        ValueError: a text that is no setting, or a setting that is given twice.
    """
    given = list(texts)
    read = [read_setting(text, example) for text in given]
    check_once(given)
    return dict(read)


def check_once(texts: Iterable[str]) -> None:
    """Raise where two settings written as name=value have the same name: one of them would be lost silently.

    Raises:
        ValueError: with both of them.
    """
    seen: dict[str, str] = {}
    for text in texts:
        name = text.partition("=")[0].strip()
        if name in seen:
            raise ValueError(f"{name} is set twice, as {shown(seen[name])} and as {shown(text)}; give it once")
        seen[name] = text


def _no_number(name: str) -> Never:
    """NaN and Infinity, which Python's reader of JSON takes for numbers, are plain text."""
    raise ValueError(f"{name} is no number in JSON")


def process_of_run() -> tuple[int, int]:
    """Rank and number of processes, as torchrun sets them; 0 of 1 without it.

    Raises:
        ValueError: RANK or WORLD_SIZE is no whole number, or the rank is not below the number of processes.
    """
    given = {name: os.environ.get(name, usual) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    said = " and ".join(f"{name}={text}" for name, text in given.items())
    try:
        rank, world = (int(text) for text in given.values())
    except ValueError:
        raise ValueError(f"{said}: both must be whole numbers, as torchrun sets them") from None
    if not 0 <= rank < world:
        raise ValueError(f"{said}: the rank must be below the number of processes")
    return rank, world
