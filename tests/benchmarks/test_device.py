"""`python -m benchmarks.device`: the runner's outcomes, and its parts at small size."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.device import report
from benchmarks.device.part import Command, Part, run_command, run_part, tables_of, verdict_of
from benchmarks.device.parts import PARTS
from tests.preloaded import python


def test_what_fails_or_takes_too_long_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    part = Part(
        "three",
        "outcomes",
        (
            Command("platform", small=("--terse",)),
            Command("json.tool", small=("no-such-file",)),
            Command("platform", small=(), needs=("no_such_package",)),
            Command("platform", small=None),
        ),
    )
    outcomes = run_part(part, "cpu", small=True)
    assert [each["verdict"] for each in outcomes] == ["done", "failed", "skipped", "skipped"]
    assert "no-such-file" in outcomes[1]["why"]
    assert outcomes[2]["why"] == "not installed: no_such_package"
    assert verdict_of(outcomes) == "failed"
    assert run_part(part, "cpu", small=False)[0]["why"].startswith("no GPU")
    report.write(tmp_path, {"three": report.entry(outcomes, "failed", "cpu", True)}, [part])
    assert report.read(tmp_path)["three"]["commands"] == outcomes
    assert "failed: exit status" in (tmp_path / "device.md").read_text()


def test_a_machine_without_pydantic_skips_all_but_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.device.part.find_spec", lambda name: None if name == "pydantic" else True)
    runs = {
        each.name for each in PARTS if not all(command.reason_to_skip("gpu", False) for command in each.commands)
    }
    assert runs == {"kernels-float32", "kernels-float16", "kernels-bfloat16"}
    assert PARTS[0].commands[0].reason_to_skip("gpu", False) == "not installed: pydantic"


def test_a_warning_divides_no_table_and_the_error_is_said() -> None:
    shown = "import sys\nprint('t\\n| a |\\n|---|\\n| 1 |')\nprint('a warning', file=sys.stderr)\nprint('| 2 |')\n"
    table = {"title": "t", "header": ["a"], "rows": [["1"], ["2"]]}
    for end, why in (("", ""), ("print('unequal'); sys.exit(1)", "unequal"), ("1 / 0", "division by zero")):
        found = run_command([sys.executable, "-c", shown + end], "c", 60.0, "cpu")
        assert (found.tables, found.why.endswith(why)) == ([table], True)
        assert found.verdict == ("failed" if end else "done")


def test_a_command_that_outlives_the_budget_is_stopped() -> None:
    asked = Part("slow", "", (Command("http.server", small=("0", "--bind", "127.0.0.1")), Command("this")), 2.0)
    slow, after = run_part(asked, "cpu", small=True)
    assert (slow["verdict"], after["verdict"]) == ("out of time", "out of time")
    assert slow["seconds"] < 60


def test_tables_are_read_from_markdown() -> None:
    found = tables_of("noise\ntimes, 3 rounds\n\n| | ms |\n|---|---:|\n| a | 1 |\n| b | 2 |\nend\n| x |\n|---|\n")
    assert found[0] == {"title": "times, 3 rounds", "header": ["", "ms"], "rows": [["a", "1"], ["b", "2"]]}
    assert found[1] == {"title": "end", "header": ["x"], "rows": []}


def test_parts_are_below_eight_minutes_and_have_names_of_their_own() -> None:
    assert all(part.budget < 480 for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.long
def test_small_parts_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("kernels-bfloat16", "llada-8b", "places", "diffusion-gemma")
    monkeypatch.setattr(sys, "executable", python())  # of the processes that it starts: they have the imports
    arguments = ["--small", "--out", str(tmp_path), f"--part={','.join(names)}"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.device", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks.device", run_name="__main__", alter_sys=False)
    assert ended.value.code == 0, capsys.readouterr().out[-3000:]
    parts = json.loads((tmp_path / "device.json").read_text())["parts"]
    assert {name: part["verdict"] for name, part in parts.items()} == dict.fromkeys(names, "done")
    assert all(outcome["tables"] for part in parts.values() for outcome in part["commands"])
