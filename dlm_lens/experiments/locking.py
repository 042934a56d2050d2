"""Files and directories that one process at a time may write; a killed process leaves no lock behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def lock(file: IO[Any], *, wait: bool) -> None:
    """Lock an open file until it is closed.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold a directory against other processes, which wait."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        lock(file, wait=True)
        yield
