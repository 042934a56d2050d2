"""`kill_when`: work in a fork of this process, which has the imports, killed (SIGKILL) once something is so.

Not for work that loads a model: its threads fail in a fork of a process whose torch has computed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.files.kills import run_forked


def kill_when(arrived: Callable[[], bool], work: Callable[[], Any]) -> None:
    """Do some work in a child, which is killed wherever it is once `arrived` is true; it must not end before."""

    def watch() -> None:
        def die() -> None:
            while not arrived():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()

    status, told = run_forked(work, watch)
    assert status == -signal.SIGKILL, f"it ended before it was killed: {told}"
