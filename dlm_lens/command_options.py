"""Checks of a command line's arguments that need no torch: a wrong one is answered before anything is imported."""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

LEVELS = ("head", "layer", "model")
CLASSES = ("all", "masked", "unmasked", "prompt", "block")
"""Classes of queries (`dlm_lens.recording.CLASSES`)."""
STORAGES = ("float32", "float16")
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float", "float64", "double")
"""What weights may be computed in (`dlm_lens.load`)."""


def one_of(option: str, value: str, known: Iterable[str]) -> str:
    """The value of an option that must be one of a few words.

    Raises:
        ValueError: it is not.
    """
    names = list(known)
    if value not in names:
        near = difflib.get_close_matches(value, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{option} is {value!r}; {hint}it is one of {', '.join(names)}")
    return value


def check_least(least: float, **values: float | None) -> None:
    """Raise unless the options that are given are at least so much.

    Raises:
        ValueError: one is less.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least:g}")


def check_storage(option: str, value: str) -> None:
    """Raise unless a word says how statistics are stored.

    Raises:
        ValueError: it does not.
    """
    if value not in STORAGES:
        raise ValueError(f"{option} is {value!r}; it must be {' or '.join(map(repr, STORAGES))}")


def whole_numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers with commas between them, such as 0,5,-1; None for None.

    Raises:
        ValueError: something that is no whole number.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers with commas between them, got {text!r}") from None


def index_or_mean(option: str, text: str | None) -> int | str | None:
    """The index of a layer or head, or "mean"; None for None.

    Raises:
        ValueError: neither.
    """
    if text is None or text == "mean":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give an index, or mean") from None


def check_dtype(text: str | None, option: str = "--dtype") -> None:
    """Raise unless a name is that of a floating dtype in which weights are computed.

    Raises:
        ValueError: it is not.
    """
    if text is not None:
        one_of(option, text.removeprefix("torch."), DTYPES)


def check_device(text: str | None, option: str = "--device") -> None:
    """Raise unless a name looks like that of a device.

    Raises:
        ValueError: it does not.
    """
    if text is not None and not re.fullmatch(r"[a-z_]+(:[0-9]+)?", text):
        raise ValueError(f"{option} is {text!r}; it is cpu, cuda, cuda:1 or auto")


def check_directory(path: Path) -> None:
    """Raise unless files can be written below a path: a directory, or nothing yet.

    Raises:
        FileExistsError: it is a file, or lies below one.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise FileExistsError(f"{place} is a file; give a directory")


def check_file(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise unless a file can be written to a path.

    Raises:
        IsADirectoryError: it is a directory.
        FileNotFoundError: its directory is not there.
        ValueError: a suffix that is none of `suffixes`.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the name of a file, such as {path / 'file'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not there; make the directory first")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; it is written as {', '.join(suffixes)}")
