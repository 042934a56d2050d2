"""Logs: JSON lines with a checksum each, appended to a file whose last line a killed process may have cut."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dlm_lens.files.atomic_writes import append
from dlm_lens.files.sealed_json import CHECKSUM, parsed, sealed, unsealed


def line_of(values: Mapping[str, Any]) -> bytes:
    """The values as one line of JSON, with their checksum.

    Raises:
        ValueError: a number that is not finite, which is no JSON.
    """
    return (json.dumps(sealed(values), allow_nan=False) + "\n").encode()


def append_lines(file: IO[bytes], entries: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Append lines to a log that is open for it (`open_to_append`); they are on the disk when this returns.

    Raises:
        DiskFullError: there is no space for them; the log stays as it was.
        ValueError: a number that is not finite.
    """
    append(file, b"".join(map(line_of, entries)), path)


def read_lines(
    data: bytes, path: Path, remedy: str, *, required: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each complete line of a log is, and its values without their checksum, which is compared.

    A last line without its newline is left out.

    Args:
        data: the content of the log.
        path: of the log, for errors.
        remedy: the advice in an error about a damaged line.
        required: whether every line must have a checksum. Otherwise a log whose first line has none is of an
            earlier version, and none is required of its lines.

    Raises:
        DamagedFileError: a line is no JSON object, or does not have its checksum.
    """
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        where = f"{path}, line {number}"
        found = parsed(text, where, remedy)
        required |= number == 1 and CHECKSUM in found
        yield where, unsealed(found, where, remedy, required=required)


def cut_incomplete_line(file: IO[bytes], path: Path) -> None:
    """Remove what a killed process wrote of its last line, to which a new line would be joined."""
    with path.open("rb") as stored:
        size = stored.seek(0, os.SEEK_END)
        if not size:
            return
        stored.seek(-1, os.SEEK_END)
        if stored.read(1) == b"\n":
            return
        stored.seek(0)
        os.ftruncate(file.fileno(), stored.read().rfind(b"\n") + 1)
