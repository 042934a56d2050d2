"""JSON objects of files that others wrote: read with bounds on size and depth, refused in a sentence."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlm_lens.files.paths import read_utf8
from dlm_lens.printable import one_line, printable_name, shown

LARGEST = 64 * 2**20
"""Bytes of a JSON file."""

DEEPEST = 32
"""Levels of nested objects and arrays."""

_TOO_DEEP = f"nested too deeply; {DEEPEST} levels are the most"


class NestedTooDeeplyError(ValueError):
    """JSON with more levels of objects and arrays than Python's parser takes."""


def parse_json(content: bytes | str, *, constants: bool = False) -> Any:
    """The value of JSON text.

    Args:
        content: the text; bytes are UTF-8.
        constants: accept NaN and Infinity, which Python writes although JSON has none.

    Raises:
        NestedTooDeeplyError: too many levels.
        ValueError: no JSON, no UTF-8, or a number of too many digits.
    """
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        return json.loads(text, parse_constant=None if constants else _refuse_constant)
    except RecursionError:
        raise NestedTooDeeplyError(_TOO_DEEP) from None


def read_json_lines(path: Path, what: str, form: str) -> Iterator[tuple[str, str, Any]]:
    r"""The values of a file of JSON lines that are not empty: where each is, its text, the value.

    A line ends with \n alone (jsonlines.org): U+2028 and similar characters, at which `str.splitlines` cuts, belong
    to the text.

    Args:
        path: of the file.
        what: a line holds, for messages.
        form: of a line, for messages.

    Raises:
        ValueError: a file that is not UTF-8, or a line that is not JSON.
    """
    for number, text in enumerate(read_utf8(path, "JSON lines").split("\n"), 1):
        if not text.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError(f"{where} is nested too deeply to be {what}") from None
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}); a line is {form}") from None
        yield where, text, value


def read_object(path: str | Path, what: str, remedy: str = "fetch it again") -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: of the file.
        what: the file's name in a message.
        remedy: the end of a message about a file that cannot be read.

    Raises:
        ValueError: no JSON, no object, too large, nested too deeply, or with a number that is not finite.
    """
    size = Path(path).stat().st_size
    if size > LARGEST:
        raise ValueError(f"{what} has {size} bytes; {LARGEST} is the most: {remedy}")
    try:
        values = parse_json(Path(path).read_bytes(), constants=True)  # `check_plain` names the field
    except NestedTooDeeplyError as error:
        raise ValueError(f"{what} is {error}: {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{what} is no JSON file; {remedy} ({one_line(error)})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what} holds {shown(values)}; it must hold an object with the fields of a config")
    check_plain(values, what, remedy)
    return values


def check_plain(values: Any, what: str, remedy: str = "fetch it again") -> None:
    """Refuse values that are nested too deeply, and numbers that are not finite. Arguments: `read_object`.

    Raises:
        ValueError: with the name of the field.
    """
    pending: list[tuple[str, int, Any]] = [("", 0, values)]
    while pending:
        field, depth, value = pending.pop()
        if depth > DEEPEST:
            raise ValueError(f"{what} is {_TOO_DEEP}: {remedy}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what} says {printable_name(field)} = {value}; it must be a finite number")
        if isinstance(value, dict):
            pending += [(f"{field}.{name}" if field else str(name), depth + 1, one) for name, one in value.items()]
        elif isinstance(value, list):
            pending += [(field, depth + 1, one) for one in value]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
