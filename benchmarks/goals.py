"""The goals of speed and memory: measures every row again and says which changed by more than the noise.

    python -m benchmarks.goals [ROW ...] [--repeats 3] [--write]

A row (benchmarks/goals.yaml) is one number that a benchmark prints in a table. Its command runs `--repeats` times,
each in a process of its own; the row is the median, its noise the least and the greatest. A row changed if its new
values and its last ones (benchmarks/goals.json) do not overlap. `--write` keeps the new values there and in the
table of benchmarks/README.md.
"""

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.timing import machine

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "goals.json", HERE / "README.md"
BEGIN, END = "<!-- goals: written by python -m benchmarks.goals -->", "<!-- end of goals -->"


@dataclass(frozen=True)
class Row:
    """One number with its goal.

    Args:
        name: how it is called on the command line.
        what: what it is, for a reader.
        command: the module under `benchmarks` and its options.
        title: a part of the line above the table.
        line: the first cell of the table's line.
        column: the head of the table's column.
        goal: the greatest value that is good (the least one where `more` is better).
        more: whether more is better.
    """

    name: str
    what: str
    command: str
    title: str
    line: str
    column: str
    goal: float
    more: bool = False

    def met(self, value: float) -> bool:
        """Whether the value reaches the goal."""
        return value >= self.goal if self.more else value <= self.goal


ROWS = tuple(Row(**entry) for entry in yaml.safe_load((HERE / "goals.yaml").read_text()))


def tables_of(text: str) -> list[tuple[str, list[dict[str, str]]]]:
    """The Markdown tables of a text: the line of words above each, and its lines by the heads of the columns."""
    found: list[tuple[str, list[dict[str, str]]]] = []
    title, heads = "", None
    for line in text.splitlines():
        if not line.startswith("|"):
            title, heads = line.strip() or title, None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heads is None:
            heads = cells
            found.append((title, []))
        elif not set("".join(cells)) <= set("-:"):
            found[-1][1].append(dict(zip(heads, cells, strict=True)))
    return found


def number(row: Row, text: str) -> float:
    """The row's number in what its benchmark printed.

    Raises:
        LookupError: no table has this line and column.
    """
    for title, lines in tables_of(text):
        for line in lines:
            if row.title in title and next(iter(line.values())) == row.line and row.column in line:
                return float(line[row.column].replace(",", "").split()[0])
    raise LookupError(f"{row.name}: benchmarks.{row.command} printed no table with {row.line!r} and {row.column!r}")


def measured(command: str, repeats: int) -> list[str]:
    """What a benchmark printed, `repeats` times."""
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    texts = []
    for turn in range(repeats):
        typer.echo(f"{turn + 1} of {repeats}: python -m {' '.join(words[2:])}", err=True)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"python -m {' '.join(words[2:])} failed:\n{done.stderr[-2000:]}")
        texts.append(done.stdout)
    return texts


def changed(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether no new value lies between the old ones' least and greatest, nor the other way round."""
    return min(new) > max(old) or max(new) < min(old)


def shown(value: float, goal: float) -> str:
    """Three digits of a value, or four where three are those of a goal that it does not have."""
    return f"{value:.4g}" if value != goal and float(f"{value:.3g}") == goal else f"{value:.3g}"


def page_table(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of goals, in Markdown."""
    lines = ["| | goal | measured | from, to | | command, date |", "|---|---:|---:|---:|---|---|"]
    for row in ROWS:
        if row.name not in kept:
            lines.append(f"| {row.what} | {row.goal:g} | | | not measured | `python -m benchmarks.{row.command}` |")
            continue
        found = kept[row.name]
        values = found["values"]
        middle, sign = statistics.median(values), "at least " if row.more else ""
        verdict = "met" if row.met(middle) else "**missed**"
        found_middle, least, greatest = (shown(each, row.goal) for each in (middle, min(values), max(values)))
        lines.append(
            f"| {row.what} | {sign}{row.goal:g} | {found_middle} | {least}, {greatest} | {verdict} "
            f"| `python -m benchmarks.{row.command}`, {found['date']} |"
        )
    machines = sorted({found["machine"] for found in kept.values()})
    return "\n".join([*lines, "", "Machine: " + "; ".join(machines) + ".", ""])


def write(kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep the values, and write the table into the page."""
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page_table(kept)}{END}{after}")


def main(
    rows: Annotated[list[str] | None, typer.Argument(help="rows by name; all without one")] = None,
    repeats: Annotated[int, typer.Option(help="how often each command runs")] = 3,
    keep: Annotated[bool, typer.Option("--write", help="keep the values and write the table")] = False,
) -> None:
    """Measure rows and compare them with their goals and with their last values."""
    names = [row.name for row in ROWS]
    unknown = sorted(set(rows or ()) - set(names))
    if unknown:
        raise typer.BadParameter(f"there is no row {', '.join(unknown)}; there are {', '.join(names)}")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    chosen = [row for row in ROWS if not rows or row.name in rows]
    for command in dict.fromkeys(row.command for row in chosen):
        texts = measured(command, repeats)
        for row in (row for row in chosen if row.command == command):
            values = [number(row, text) for text in texts]
            before = kept.get(row.name, {}).get("values")
            middle = statistics.median(values)
            verdict = "met" if row.met(middle) else "missed"
            change = "new" if before is None else "changed" if changed(values, before) else "as before"
            was = f" (was {statistics.median(before):.3f})" if before else ""
            noise = f"[{min(values):.3f}, {max(values):.3f}]"
            typer.echo(f"{row.name:18} {middle:8.3f} {noise}  goal {row.goal:g}: {verdict}; {change}{was}")
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            kept[row.name] = {"values": values, "date": today, "machine": machine()}
            if keep:
                write(kept)  # after every row: what was measured is not lost


def typer_app() -> typer.Typer:
    """The command."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    return app


if __name__ == "__main__":
    typer_app()()
