"""JSON files that came with a checkpoint: read with bounds, and refused in a sentence."""

import json
import math
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20
"""Bytes of a config or an index."""

DEEPEST = 32
"""Levels of nested objects and arrays."""


def read_object(path: str | Path, what: str, remedy: str = "fetch it again") -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: of the file.
        what: the file, as the sentence calls it.
        remedy: what to do about a file that cannot be read.

    Raises:
        ValueError: no JSON, no object, too large, nested too deeply, or with a number that is not finite.
    """
    size = Path(path).stat().st_size
    if size > LARGEST:
        raise ValueError(f"{what} has {size} bytes; {LARGEST} is the most: {remedy}")
    try:
        values = json.loads(Path(path).read_bytes().decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply; {DEEPEST} levels are the most: {remedy}") from None
    except ValueError as error:  # UnicodeDecodeError and a number of too many digits among them
        raise ValueError(f"{what} is no JSON file; {remedy} ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what} holds {shown(values)}; it must hold an object with the fields of a config")
    check_plain(values, what, remedy)
    return values


def check_plain(values: Any, what: str, remedy: str = "fetch it again") -> None:
    """Refuse what is nested too deeply, and numbers that are not finite.

    Raises:
        ValueError: with the place.
    """
    pending: list[tuple[str, int, Any]] = [("", 0, values)]
    while pending:
        place, depth, value = pending.pop()
        if depth > DEEPEST:
            raise ValueError(f"{what} is nested too deeply; {DEEPEST} levels are the most: {remedy}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what} says {printable(place)} = {value}; it must be a finite number")
        if isinstance(value, dict):
            pending += [(f"{place}.{name}" if place else str(name), depth + 1, one) for name, one in value.items()]
        elif isinstance(value, list):
            pending += [(place, depth + 1, one) for one in value]


def printable(name: str, most: int = 120) -> str:
    """A name from a file for a sentence, in `most` characters; escaped where a terminal would act on it."""
    kept = name if name.isprintable() else repr(name)[1:-1]
    return kept if len(kept) <= most else f"{kept[: most - 3]}..."


def shown(value: Any) -> str:
    """A value from a file for a sentence, in at most 60 characters."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(error: BaseException) -> str:
    """What an exception says, as the rest of a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.isprintable() else repr(text)[1:-1]
