"""Checks of the paths that a user gives, before any work is done."""

from collections.abc import Sequence
from pathlib import Path


def check_directory(path: Path) -> None:
    """Raise unless files can be written below a path: it is a directory, or does not exist yet.

    Raises:
        FileExistsError: it is a file, or lies below one.
    """
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise FileExistsError(f"{part} is a file; give a directory")


def check_file(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise unless a file can be written to a path.

    Raises:
        IsADirectoryError: it is a directory.
        FileExistsError: it lies below a file.
        FileNotFoundError: its directory does not exist.
        ValueError: a suffix that is not among `suffixes`.
    """
    if path.is_dir():
        name = f"file{suffixes[0]}" if suffixes else "file"
        raise IsADirectoryError(f"{path} is a directory; give the name of a file, such as {path / name}")
    check_directory(path.parent)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist; make the directory first")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; it is written as {', '.join(suffixes)}")
