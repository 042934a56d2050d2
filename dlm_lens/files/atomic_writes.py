"""Atomic writes: a file is written under a temporary name, flushed to the disk, then renamed."""

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from dlm_lens.files.locks import lock

TEMPORARY = re.compile(r"\.dlm-lens-[0-9a-f]{16}\.part")
"""Names of files that are being written; one that no process has locked was left by a killed process."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class DiskFullError(OSError):
    """A file could not be written because the disk is full; the previous file is unchanged."""


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends; on an error nothing changes.

    The file has the mode of the process's umask. Its temporary name is unpredictable and never a link's.

    Raises:
        DiskFullError: there is no space for it.
        OSError: it cannot be written there.
    """
    path = Path(path)
    with disk_errors(path), _named(path):
        temporary, file = _temporary(path.parent)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if sys.platform != "win32":  # before its lock ends
                    temporary.replace(path)
            if sys.platform == "win32":  # has no locks, and does not rename an open file
                temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(path.parent)


def write_file(path: str | Path, content: bytes | str) -> Path:
    """Write a file, and remove temporary files of killed processes from its directory.

    Raises:
        DiskFullError: there is no space for it.
        OSError: it cannot be written there.
    """
    path = Path(path)
    remove_stale(path.parent)
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def write_figure(path: str | Path, figure: Any, dpi: int = 150) -> Path:
    """Write a matplotlib figure without margins, in the format of the path's suffix.

    Raises:
        DiskFullError: there is no space for it; what was there before is unchanged.
        OSError: it cannot be written there.
    """
    path = Path(path)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), bbox_inches="tight", dpi=dpi)
    return path


def append(file: IO[bytes], content: bytes, path: Path) -> None:
    """Append to a file that is open for it without a buffer, flushed to the disk, or leave it as it is.

    Raises:
        DiskFullError: there is no space for it.
    """
    size = os.fstat(file.fileno()).st_size
    with disk_errors(path):
        try:
            # One write, so that a line is complete or cut at its end, never mixed with another process's.
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, "the disk took a part of a line")
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file to append to, without a buffer; a link is not followed."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINKS, 0o666), "ab", buffering=0)


def remove_stale(directory: Path) -> None:
    """Remove the temporary files of processes that were killed; those of living ones are locked, and stay."""
    try:
        left = [Path(entry.path) for entry in os.scandir(directory) if TEMPORARY.fullmatch(entry.name)]
    except OSError:
        return
    for path in left:
        with suppress(OSError):
            if sys.platform == "win32":  # refuses to delete what a process has open
                path.unlink()
                continue
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS)
            with os.fdopen(handle, "rb") as file:
                if stat.S_ISREG(os.fstat(handle).st_mode) and lock(file, wait=False):
                    path.unlink()


def sync_directory(directory: Path) -> None:
    """Flush a directory to the disk: a new file's name has to be there too."""
    if sys.platform == "win32":  # which opens no directory
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `DiskFullError` with a message in place of the system's error for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or isinstance(error, DiskFullError):
            raise
        full = DiskFullError(f"{path} could not be written ({os.strerror(error.errno)}); make room and do it again")
        full.errno = error.errno
        raise full from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in the system's error in place of its temporary file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and TEMPORARY.fullmatch(Path(os.fsdecode(error.filename)).name):
            error.filename = str(path)
            del error.filename2  # None would be written as a second name
        raise


def _temporary(directory: Path) -> tuple[Path, BinaryIO]:
    """A new temporary file of this process, locked so that no other process removes it as stale."""
    while True:
        path = directory / f".dlm-lens-{secrets.token_hex(8)}.part"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o666)
        file = os.fdopen(handle, "wb")
        lock(file, wait=True)
        if os.fstat(handle).st_nlink:
            return path, file
        file.close()  # removed as stale between its making and its lock
