"""A part: commands with a time budget, what they need, and what became of them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["done", "failed", "skipped", "out of time"]
Device = Literal["gpu", "cpu", "pretended"]
ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("pydantic",)
"""What dlm_lens needs to build a model, and a GPU machine may lack; benchmarks/README.md says how to bring it."""
KEPT = 6000
"""Characters of a command's output that are kept, from its end."""


@dataclass(frozen=True)
class Command:
    """`python -m module arguments`.

    Args:
        module: what `-m` gets.
        full: arguments on a GPU.
        small: arguments of `--small`; None: the command has no small size and is skipped.
        needs: packages without which it is skipped.
        not_pretended: why it does not run on the pretended device, if it does not.
    """

    module: str
    full: tuple[str, ...] = ()
    small: tuple[str, ...] | None = ()
    needs: tuple[str, ...] = LIBRARY
    not_pretended: str = ""

    def reason_to_skip(self, device: Device, small: bool) -> str:
        """Why it is not run here; empty if it is."""
        missing = [name for name in self.needs if find_spec(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if device == "pretended" and self.not_pretended:
            return self.not_pretended
        if device != "gpu" and not small:
            return "no GPU (--small runs it at small size on the CPU)"
        return "no small size" if small and self.small is None else ""

    def line(self, device: Device, small: bool) -> list[str]:
        """The command line; on the pretended device `child` installs it before torch is imported."""
        arguments = (self.small or ()) if small else self.full
        if device != "pretended":
            return [sys.executable, "-m", self.module, *arguments]
        return [sys.executable, "-m", "benchmarks.device.child", self.module, *arguments]


@dataclass(frozen=True)
class Part:
    """Commands that are run one after the other within `budget` seconds."""

    name: str
    shows: str
    commands: tuple[Command, ...]
    budget: float = 470.0


@dataclass(frozen=True)
class Outcome:
    """What became of one command.

    Args:
        command: the command line.
        verdict: done; failed, with the error; skipped, with the reason; or out of time.
        seconds: how long it ran.
        why: the error or the reason.
        tables: its Markdown tables, as title, header and rows.
        output: the end of what it printed.
    """

    command: str
    verdict: Verdict
    seconds: float = 0.0
    why: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""


def run_part(part: Part, device: Device, small: bool) -> list[dict[str, Any]]:
    """Run every command of a part; one that fails does not stop the others."""
    ends, found = time.monotonic() + part.budget, []
    for command in part.commands:
        line = command.line(device, small)
        shown = "python " + " ".join(line[1:])
        reason = command.reason_to_skip(device, small)
        if reason:
            outcome = Outcome(shown, "skipped", why=reason)
        else:
            print(f"  {shown}", flush=True)
            outcome = run_command(line, shown, ends - time.monotonic(), device)
        print(f"  {outcome.verdict}, {outcome.seconds:.0f} s {outcome.why[-200:]}", flush=True)
        found.append(asdict(outcome))
    return found


def run_command(line: Sequence[str], shown: str, seconds: float, device: Device) -> Outcome:
    """Run one command for at most `seconds`, with all processes that it starts."""
    if seconds < 1:
        return Outcome(shown, "out of time", why="the part's time was spent before it began")
    variables = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "DLM_LENS_TEST_DEVICE": device}
    variables["TYPER_STANDARD_TRACEBACK"] = "1"  # whose last line is the error
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | variables
    started = time.monotonic()
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        taken = time.monotonic() - started
        why = f"stopped after {taken:.0f} s"
        return Outcome(shown, "out of time", taken, why, tables_of(printed), (printed + errors)[-KEPT:])
    except BaseException:  # Ctrl-C: leave no process behind
        os.killpg(process.pid, signal.SIGKILL)
        raise
    taken = time.monotonic() - started
    tables = tables_of(printed)  # a warning would divide them
    output = printed + errors if "Traceback" in errors else errors + printed  # what went wrong is said last
    if process.returncode:
        why = f"exit status {process.returncode}: {_last_line(output)}"
        return Outcome(shown, "failed", taken, why, tables, output[-KEPT:])
    return Outcome(shown, "done", taken, "", tables, output[-KEPT:])


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    return lines[-1][:500] if lines else "no output"


def tables_of(output: str) -> list[dict[str, Any]]:
    """The Markdown tables of a text; a table's title is the last line of text before it."""
    found: list[dict[str, Any]] = []
    title, table = "", None
    for line in map(str.strip, output.splitlines()):
        if not line.startswith("|"):
            title, table = line or title, None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if table is None:
            table = {"title": title, "header": cells, "rows": []}
            found.append(table)
        elif not set("".join(cells)) <= set("-: "):
            table["rows"].append(cells)
    return found


def verdict_of(outcomes: Sequence[dict[str, Any]]) -> Verdict:
    """That of a part: the worst of its commands; skipped only if all were."""
    verdicts = {outcome["verdict"] for outcome in outcomes}
    for worst in ("failed", "out of time", "done"):
        if worst in verdicts:
            return worst
    return "skipped"
