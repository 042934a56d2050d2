"""The JSON and the Markdown of the parts that were run, and of the machine."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.device.part import ROOT, Part

PACKAGES = ("torch", "triton", "transformers", "accelerate", "nnsight", "transformer-lens")


def machine() -> dict[str, Any]:
    """GPU, driver, processor and versions of what computes."""
    return {
        "gpus": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def commit() -> str:
    """The commit of the code; a copy without git says so, unless DLM_LENS_COMMIT names it."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not found:
        return os.environ.get("DLM_LENS_COMMIT", "unknown (no git here; set DLM_LENS_COMMIT)")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return found + (" with changes" if changed else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def read(folder: Path) -> dict[str, Any]:
    """What was run before; nothing if there is no file.

    Raises:
        ValueError: the file is not what `write` writes.
    """
    path = folder / "device.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of benchmarks.device ({error}); move it away") from error


def entry(outcomes: list[dict[str, Any]], verdict: str, device: str, small: bool) -> dict[str, Any]:
    """A part's record."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    known = {"verdict": verdict, "device": device, "small": small, "date": date, "commit": commit()}
    return {**known, "machine": machine(), "commands": outcomes}


def write(folder: Path, parts: dict[str, Any], known: Iterable[Part]) -> None:
    """device.json and device.md, each replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("device.json", json.dumps({"parts": parts}, indent=1) + "\n"),
        ("device.md", markdown(parts, known)),
    ):
        unfinished = folder / f".{name}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)


def markdown(parts: dict[str, Any], known: Iterable[Part]) -> str:
    """One table of all commands, then their own tables and what failed."""
    lines = ["# On a GPU: results", ""]
    for text in dict.fromkeys(_ran_on(part) for part in parts.values()):
        lines += [text, ""]
    lines += ["| part | shows | command | outcome | seconds |", "|---|---|---|---|---:|"]
    details: list[str] = []
    for number, part in enumerate(known, start=1):
        for outcome in parts.get(part.name, {"commands": []})["commands"]:
            why = outcome["why"].replace("|", "\\|").replace("\n", " ")[:160]
            said = outcome["verdict"] + (f": {why}" if why else "")
            command = outcome["command"].replace("|", "\\|")
            lines.append(
                f"| {number} {part.name} | {part.shows} | `{command}` | {said} | {outcome['seconds']:.0f} |"
            )
            details += _details(part, outcome)
        if part.name not in parts:
            lines.append(f"| {number} {part.name} | {part.shows} | | not run | |")
    return "\n".join([*lines, *details]) + "\n"


def _ran_on(part: dict[str, Any]) -> str:
    """One sentence for all parts of one machine and commit."""
    machine = ", ".join(f"{name} {value}" for name, value in part["machine"].items() if value)
    size = "small size" if part["small"] else "full size"
    return f"{part['date'][:10]}, commit {part['commit']}, device: {part['device']} ({size}); {machine}."


def _details(part: Part, outcome: dict[str, Any]) -> list[str]:
    lines = []
    for table in outcome["tables"]:
        rows = [table["header"], ["---"] * len(table["header"]), *table["rows"]]
        lines += ["", f"{part.name}: {table['title']}", "", *("| " + " | ".join(row) + " |" for row in rows)]
    if outcome["verdict"] == "failed":
        lines += ["", f"{part.name}, `{outcome['command']}` failed:", "", "```", outcome["output"][-2000:], "```"]
    return lines
