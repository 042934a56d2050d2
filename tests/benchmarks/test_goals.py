"""`python -m benchmarks.goals`: reading tables, verdicts, and that every row names a line of its benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import goals

PRINTED = """
forward, 4 layers; CPU

| | ms | ratio |
|---|---:|---:|
| plain | 1,159.90 | 1.000 |
| ours | 1,169.90 | 1.009 |

another table

| | ms | ratio |
|---|---:|---:|
| ours | 1 | 7.5 |
"""
ROW = goals.Row("forward", "a pass", "forward", "forward", "ours", "ratio", 1.02)


def test_a_number_is_found_by_title_line_and_column() -> None:
    assert goals.number(ROW, PRINTED) == 1.009
    assert goals.number(goals.Row("x", "", "forward", "another", "ours", "ratio", 1.0), PRINTED) == 7.5
    assert goals.number(goals.Row("x", "", "forward", "forward", "plain", "ms", 1.0), PRINTED) == 1159.90
    with pytest.raises(LookupError, match=r"benchmarks\.forward printed no table with 'theirs' and 'ratio'"):
        goals.number(goals.Row("x", "", "forward", "forward", "theirs", "ratio", 1.0), PRINTED)


def test_changed_means_that_the_ranges_do_not_overlap() -> None:
    assert goals.changed([1.2, 1.3], [1.0, 1.1])
    assert goals.changed([0.8], [1.0, 1.1])
    assert not goals.changed([1.05, 1.3], [1.0, 1.1])
    assert not goals.changed([0.9, 1.2], [1.0, 1.1])


@pytest.mark.parametrize("row", goals.ROWS, ids=lambda row: row.name)
def test_every_row_names_a_line_of_its_benchmark(row: goals.Row) -> None:
    module = row.command.split()[0]
    text = (Path(goals.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    # A length or a command stands in the options in place of the file.
    assert row.line in text or row.line.removeprefix("dlm-lens ") in row.command


def test_values_are_kept_and_compared_with_the_last_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# Benchmarks\n\n{goals.BEGIN}\nold\n{goals.END}\n\nrest\n", encoding="utf-8")
    monkeypatch.setattr(goals, "PAGE", page)
    monkeypatch.setattr(goals, "KEPT", tmp_path / "goals.json")
    monkeypatch.setattr(goals, "ROWS", (ROW,))
    factor = [1.0]

    def printed(command: str, repeats: int) -> list[str]:
        return [PRINTED.replace("1.009", str((1.009 + 0.001 * turn) * factor[0])) for turn in range(repeats)]

    monkeypatch.setattr(goals, "measured", printed)

    def say(*arguments: str) -> Any:
        return CliRunner().invoke(goals.typer_app(), arguments)

    assert "met; new" in say("--write").output
    assert json.loads((tmp_path / "goals.json").read_text())["forward"]["values"] == pytest.approx(
        [1.009, 1.01, 1.011]
    )
    assert "| 1.02 | 1.01 | 1.01, 1.01 | met |" in page.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").endswith("\n\nrest\n")
    assert "as before (was 1.010)" in say().output
    factor[0] = 1.5
    assert "missed; changed (was 1.010)" in say().output
    assert "there is no row nothing; there are forward" in say("nothing").output.replace("\n", " ").replace(
        "│ ", ""
    )
