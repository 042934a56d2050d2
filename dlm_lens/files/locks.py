"""Locks on files and directories that one process at a time may write; they end with the process."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

HOLDS, ALONE = ".held", ".lock"
"""The files that are locked: where directories cannot be, and for `alone`."""

RETRIES = 100
"""How often a directory that another process removes is made again before the error is raised."""


class DirectoryHeldError(ValueError):
    """Another process, or another thread of this one, writes a directory."""


def lock(file: IO[Any] | int, *, wait: bool, shared: bool = False) -> bool:
    """Lock an open file until it is closed; returns whether it is locked.

    False on Windows, and where its file system has no locks.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if isinstance(error, BlockingIOError) or error.errno == errno.EINTR:
            raise
        return False
    return True


@contextmanager
def held(directory: str | Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Lock a directory against other processes and threads; it is created where it does not exist.

    The lock is on the directory itself, and ends with the process. Network disks lock files alone: there it is on a
    file `HOLDS`, which stays where the lock is shared or its process is killed. Directories that are created here,
    parents too, and still empty at the end are removed, unless the lock is shared. On Windows nothing is locked.

    Args:
        directory: to lock.
        shared: with other shared locks (of processes that each write a part of it).
        wait: for other locks to end.

    Raises:
        DirectoryHeldError: it is locked already.
    """
    directory = Path(directory)
    created = [one for one in (directory, *directory.parents) if not one.exists()]
    if sys.platform == "win32":
        directory.mkdir(parents=True, exist_ok=True)
        handle = None
    else:
        handle = _locked(directory, shared=shared, wait=wait)
    try:
        yield
    finally:
        if handle is not None and not shared:
            (directory / HOLDS).unlink(missing_ok=True)
        for one in () if shared else created:
            with suppress(OSError):  # not empty
                one.rmdir()
        if handle is not None:
            _release(handle)


def _locked(directory: Path, *, shared: bool, wait: bool) -> int:
    """A handle of the locked directory; it is made again where another holder removes it meanwhile.

    Raises:
        DirectoryHeldError: it is locked already.
    """
    failures = 0
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, FileExistsError):
            failures += 1
            if directory.exists() or failures > RETRIES:
                raise
            continue
        try:
            locked = directory
            if not lock(handle, wait=wait, shared=shared):
                # Network disks lock only what is open for writing.
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                locked = directory / HOLDS
                file = os.open(locked, flags, 0o666)
                os.close(handle)
                handle = file
                lock(handle, wait=wait, shared=shared)
            # Another holder may have removed it between its opening and its lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(locked), os.fstat(handle)):
                    return handle
        except BlockingIOError:
            _release(handle)
            raise DirectoryHeldError(
                f"another process or thread writes {directory}; wait for it, or give another directory"
            ) from None
        except BaseException:
            _release(handle)
            raise
        _release(handle)


@contextmanager
def alone(directory: str | Path) -> Iterator[None]:
    """A block that one process at a time enters for this directory, beside locks of `held`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    with os.fdopen(os.open(directory / ALONE, flags, 0o666), "w") as file:
        lock(file, wait=True)
        yield


def other_files(directory: Path) -> list[str]:
    """The names in a directory that do not begin with a dot: those of its locks do, and of what desktops leave."""
    return sorted(one.name for one in directory.iterdir() if not one.name.startswith("."))


def _release(handle: int) -> None:
    import fcntl

    try:
        # A forked child may hold the same handle.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)
