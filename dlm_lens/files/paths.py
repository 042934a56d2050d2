"""The paths that a user gives: checks before any work is done, and `read_utf8`, the text of a file."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile

from dlm_lens.printable import printable_name, shown


def user_path(path: str | Path) -> Path:
    """A path in which "~" at its beginning is the user's home directory, and "~name" that of another user.

    Raises:
        FileNotFoundError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            f"{path} begins with the home directory of a user who does not exist; give the full path"
        ) from None


def made_file_path(path: str | Path) -> Path:
    """The path of a file to write for `save`, with its directory made: what is saved may have taken hours.

    Raises:
        FileExistsError: it lies below a file.
        IsADirectoryError: it is a directory.
        OSError: nothing can be written where it would be.
        ValueError: it is no path, or no name in UTF-8.
    """
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path is {shown(path)}; it must be the path of a file, as a text or a pathlib.Path")
    path = user_path(path)
    if not path.is_dir():
        check_directory(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
    check_file(path)
    return path


def check_utf8(path: str | Path) -> None:
    """Raise unless a path is UTF-8: the safetensors library opens no other.

    Raises:
        ValueError: it has bytes that are no character.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{printable_name(str(path), 500)} is no name in UTF-8, and the safetensors library opens no other; "
            "rename it, or give another directory"
        ) from None


def check_directory(path: Path) -> None:
    """Raise unless files can be written below a path: it is a directory, or does not exist yet and can be made.

    A directory that holds something is not tried: a finished run in it is only read.

    Raises:
        FileExistsError: it is a file, or lies below one.
        FileNotFoundError: it begins with "~", which would be made here as a directory of that name.
        OSError: nothing can be written where it would be.
        ValueError: it is no name in UTF-8, so that the tensors that are written there could not be read.
    """
    check_utf8(path)
    _check_home(path)
    for part in (path, *path.parents):
        _check_no_file(part)
    if not path.is_dir() or not any(path.iterdir()):
        _check_writable(next(part for part in (path, *path.absolute().parents) if part.is_dir()))


def _check_home(path: Path) -> None:
    """Raise where a path is below a home directory that the shell has not put in: after --out= it does not."""
    home = path.parts[0] if path.parts else ""
    if home.startswith("~") and (home == "~" or len(path.parts) > 1) and not Path(home).exists():
        raise FileNotFoundError(f"{path} begins with {home}, which is no directory here; give {user_path(path)}")


def _check_no_file(part: Path) -> None:
    if part.exists() and not part.is_dir():
        raise FileExistsError(f"{part} is a file; give a directory")


def _check_writable(directory: Path) -> None:
    """Raise unless a file can be made in a directory; permissions do not show every disk that cannot be written.

    Raises:
        OSError: it cannot.
    """
    try:
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        # Without a number, which would stand for another remedy: /proc says that there is no such file.
        raise OSError(f"nothing can be written in {directory} ({error.strerror}); give another directory") from None


def check_file(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise unless a file can be written to a path.

    Raises:
        IsADirectoryError: it is a directory.
        FileExistsError: it lies below a file.
        FileNotFoundError: its directory does not exist, or is given as "~".
        OSError: nothing can be written in its directory.
        ValueError: a suffix that is not among `suffixes`.
    """
    _check_home(path)
    if path.is_dir():
        name = f"file{suffixes[0]}" if suffixes else "file"
        raise IsADirectoryError(f"{path} is a directory; give the name of a file, such as {path / name}")
    for part in path.parents:
        _check_no_file(part)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist; make the directory first")
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; it is written as {', '.join(suffixes)}")
    _check_writable(path.parent)


def read_utf8(path: Path, needed_by: str = "text files") -> str:
    r"""The text of a file, without a byte order mark; lines end with \n, also where the file has \r\n or \r.

    Args:
        path: of the file.
        needed_by: what is in this encoding, for the message.

    Raises:
        ValueError: it is not UTF-8; the sentence has the first byte that is not.
        OSError: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}), the encoding of {needed_by}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as Python opens text files
