"""A quarter of the cases of some long tests in each run, all of them in four."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.preloaded import python
from tests.turns import NAME, TAKEN, TURNS, left_to_others, said

ROOT = Path(__file__).parents[1]


def cases(test: str, count: int, *marks: str) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(nodeid=f"{test}[case{n}]", get_closest_marker=lambda name, marks=marks: name in marks)
        for n in range(count)
    ]


def test_the_turns_have_every_case_once_and_all_other_tests_always(monkeypatch):
    single = [case for n in range(20) for case in cases(f"b.py::single{n}", 1, "long", "in_turn")]
    turned = [*cases("a.py::one", 7, "long", "in_turn"), *single]
    others = [*cases("a.py::quick", 3, "in_turn"), *cases("a.py::long", 3, "long"), *cases("a.py::plain", 3)]
    run = []
    for turn in range(TURNS):
        monkeypatch.setenv(TAKEN, str(turn))
        left = {item.nodeid for item in left_to_others([*others, *turned])}
        assert left.isdisjoint(item.nodeid for item in others)
        run.append([item.nodeid for item in turned if item.nodeid not in left])
    assert sorted(name for names in run for name in names) == sorted(item.nodeid for item in turned)
    assert sorted(sum("one" in name for name in names) for names in run) == [1, 2, 2, 2]
    assert min(sum("single" in name for name in names) for names in run) >= 2
    monkeypatch.setenv(TAKEN, "all")
    assert left_to_others([*others, *turned]) == []


def test_a_run_that_leaves_cases_to_others_says_so():
    assert said("1").startswith("long tests marked in_turn: turn 1 of 0 to 3;")
    assert said("all") == said(None) == ""


@pytest.mark.long
def test_chosen_files_have_all_their_cases_and_another_turn_is_refused():
    def collected(turn: str) -> str:
        command = [python(), "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "long"]
        environment = os.environ | {NAME: turn}
        done = subprocess.run(
            [*command, "tests/tasks/test_tasks.py"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    assert (
        collected("2").count("test_a_mistake_is_rejected")
        == collected("all").count("test_a_mistake_is_rejected")
        > 9
    )
    assert f"{NAME} is '5'; give 0 to 3, or all" in collected("5")
