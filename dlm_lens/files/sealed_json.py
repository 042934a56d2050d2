"""JSON documents with a checksum of their own, read through a schema; damage is reported in one sentence.

Also logs: JSON lines with a checksum each, appended to a file whose last line a killed process may have cut.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dlm_lens.files.atomic_writes import append
from dlm_lens.files.json_objects import parse_json
from dlm_lens.printable import one_line

CHECKSUM = "checksum"


class DamagedFileError(ValueError):
    """A file does not hold what was written into it."""


class Document(BaseModel):
    """The schema of a JSON object that this library writes: every field named, of its own type, and no other."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


Schema = TypeVar("Schema", bound=Document)


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values after a round trip through JSON, with their checksum.

    Raises:
        ValueError: a number that is not finite, which is no JSON.
    """
    plain = json.loads(json.dumps(dict(values), allow_nan=False))
    return {**plain, CHECKSUM: checksum_of(plain)}


def checksum_of(plain: Mapping[str, Any]) -> str:
    """The first 16 digits of the SHA-256 of the values as canonical JSON."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parsed(text: str | bytes, where: object, remedy: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DamagedFileError: it is none.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DamagedFileError(f"{where} is damaged ({error}); {remedy}") from None
    if not isinstance(found, dict):
        raise DamagedFileError(f"{where} is damaged; {remedy}")
    return found


def unsealed(values: Mapping[str, Any], where: object, remedy: str, *, required: bool = True) -> dict[str, Any]:
    """The values without their checksum, after comparing it.

    Raises:
        DamagedFileError: it differs, or is missing where it is required.
    """
    plain = dict(values)
    stored = plain.pop(CHECKSUM, None)
    if stored is None and not required:
        return plain
    try:
        right = stored == checksum_of(plain)
    except (RecursionError, ValueError):
        right = False
    if not right:
        what = "has no checksum" if stored is None else "its checksum is another"
        raise DamagedFileError(f"{where} is damaged ({what}); {remedy}")
    return plain


def fitted(schema: type[Schema], values: Mapping[str, Any], where: object, remedy: str) -> Schema:
    """The values as an instance of their schema.

    Raises:
        DamagedFileError: they do not fit; it names the first field.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "it"
        raise DamagedFileError(f"{where} is damaged ({name:.80}: {first['msg']:.200}); {remedy}") from None
    except RecursionError:
        raise DamagedFileError(f"{where} is damaged (nested too deeply); {remedy}") from None


@contextmanager
def naming(path: Path, remedy: str) -> Iterator[None]:
    """Name a file in the errors of what reads its values: they may be of other kinds than were written.

    Raises:
        DamagedFileError: where the values raise an error that is no sentence, such as a TypeError.
        ValueError: what they raise, with the path where it does not have it.
    """
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {one_line(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        kind = type(error).__name__
        raise DamagedFileError(f"{path} is damaged ({kind}: {one_line(error):.200}); {remedy}") from error


def file_bytes(path: Path, remedy: str) -> bytes:
    """The content of a file.

    Raises:
        DamagedFileError: it is missing, a directory, or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing; {remedy}") from None
    except IsADirectoryError:
        raise DamagedFileError(f"{path} is damaged (a directory, not a file); {remedy}") from None
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


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
