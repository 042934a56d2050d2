"""Long tests that are run in turn: many cases of one code path, and single tests that take half a minute or more.

Cases of a test that is marked `in_turn` (and `long`) are divided into four turns, of which a run of all tests has
one. The turn of a run follows from the number of commits, so that any four commits after each other have run all
cases; the first case of a test has a turn by the test's name, so that single ones are spread over the turns. A run
of chosen files or tests (by `-k` too) has all of theirs, and so has one with DLM_LENS_TURN=all (`make test-every`);
with 0 to 3 it has that turn.
"""

import os
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path
from zlib import crc32

import pytest

TURNS = 4
NAME = "DLM_LENS_TURN"
TAKEN = "_DLM_LENS_TURN_TAKEN"
"""What the run takes, for the processes of pytest-xdist."""


def take_turn(config: pytest.Config) -> None:
    """Decide which turn a run takes, once: the processes of pytest-xdist do as the first one.

    Raises:
        pytest.UsageError: DLM_LENS_TURN is neither a turn nor "all".
    """
    if hasattr(config, "workerinput"):
        return
    chosen = os.environ.get(NAME) or _turn_of_the_commit()
    if chosen not in ("all", *map(str, range(TURNS))):
        raise pytest.UsageError(f"{NAME} is {chosen!r}; give 0 to {TURNS - 1}, or all")
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    os.environ[TAKEN] = chosen if whole else "all"


def _turn_of_the_commit() -> str:
    """The number of commits modulo the number of turns; that of days where git does not count (a mere copy)."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        count = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        count = date.today().toordinal()
    return str(count % TURNS)


def left_to_others(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of other turns than the one taken."""
    taken = os.environ.get(TAKEN, "all")
    if taken == "all":
        return []
    cases: Counter[str] = Counter()
    others = []
    for item in items:
        if not (item.get_closest_marker("in_turn") and item.get_closest_marker("long")):
            continue
        test = item.nodeid.split("[")[0]
        if (crc32(test.encode()) + cases[test]) % TURNS != int(taken):
            others.append(item)
        cases[test] += 1
    return others


def said(taken: str | None) -> str:
    """What a run says of its turn at its end; empty where it had all cases."""
    if taken in (None, "all"):
        return ""
    return f"long tests marked in_turn: turn {taken} of 0 to {TURNS - 1}; {NAME}=all runs all of their cases"
