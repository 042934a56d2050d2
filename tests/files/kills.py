"""Runs in a forked child that is killed (SIGKILL) at one of its disk calls, or after some time."""

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm as tqdm_auto
from tqdm.std import tqdm

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class DiskCalls:
    """Counts the calls that change files below a directory, and kills the process at one of them.

    Args:
        directory: that counts.
        at: the number of the call, 0 for the first; None for none. Where it flushes a file, half of the cases first
            lose the end of what was written last, as a machine does that loses its power.
        tear: whether they do.
    """

    def __init__(self, directory: Path, at: int | None, tear: bool = False) -> None:
        self.directory, self.at, self.tear, self.count = str(directory), at, tear, 0

    def install(self) -> None:
        """From now on; for the rest of the process."""
        sys.addaudithook(self._heard)
        real = os.fsync

        def fsync(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path.startswith(self.directory):
                if self.count == self.at and self.tear and os.path.isfile(path):
                    os.truncate(path, max(0, os.path.getsize(path) - 7))
                self._call()
            real(handle)

        os.fsync = fsync

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or not str(arguments[0]).startswith(self.directory):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        self._call()

    def _call(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def run_forked(work: Callable[[], Any], setup: Callable[[], Any] = lambda: None) -> tuple[int, str]:
    """Do something in a child; its exit status (-9 if it was killed) and what it wrote or raised."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(readable)
            gc.freeze()  # Trainer collects garbage in every training: not that of the parent, page by copied page
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            # Progress bars share a lock with forked children, which one that is killed would keep.
            tqdm.set_lock(threading.RLock())
            tqdm_auto.set_lock(threading.RLock())
            setup()
            told = work()
            status = 0
        except BaseException:
            told = traceback.format_exc()
        os.write(writable, str(told).encode()[-4000:])
        os._exit(status)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        told = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told


def count_calls(work: Callable[[], Any], directory: Path) -> int:
    """How many disk calls some work does."""
    calls = DiskCalls(directory, None)

    def counted() -> int:
        work()
        return calls.count

    status, told = run_forked(counted, calls.install)
    assert status == 0, told
    return int(told)


def kill_at_call(work: Callable[[], Any], directory: Path, at: int, tear: bool) -> None:
    """Do some work and die at a disk call."""
    status, told = run_forked(work, DiskCalls(directory, at, tear).install)
    assert status == -signal.SIGKILL, told


def kill_at_random(work: Callable[[], Any], seconds: float, draw: random.Random) -> bool:
    """Do some work and die at some time; whether it did."""
    delay = draw.uniform(0, seconds)

    def alarm() -> None:
        def die() -> None:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()

    status, told = run_forked(work, alarm)
    assert status in (0, -signal.SIGKILL), told
    return status != 0


def hidden(directory: Path) -> list[str]:
    """Files that should not be left."""
    return [str(path) for path in directory.rglob("*") if path.name.startswith(".")]


def contents(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def kill_when(arrived: Callable[[], bool], work: Callable[[], Any]) -> None:
    """Do some work in a child, which is killed wherever it is once `arrived` is true; it must not end before.

    Not for work that loads a model: its threads fail in a fork of a process whose torch has computed.
    """

    def watch() -> None:
        def die() -> None:
            while not arrived():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()

    status, told = run_forked(work, watch)
    assert status == -signal.SIGKILL, f"it ended before it was killed: {told}"
