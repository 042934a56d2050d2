"""The checks of docs/tasks accept our solutions, and reject the mistakes that one could make."""

import copy
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import python
from tests.tasks.checks import TASKS, check, loops

pytestmark = pytest.mark.long

PAGES = Path(__file__).parents[2] / "docs" / "tasks"
ANSWERS: dict[int, dict] = {}


def solution(number):
    return importlib.import_module(f"tests.tasks.solutions.task_{number:02d}")


def answer(number):
    if number not in ANSWERS:
        ANSWERS[number] = json.loads(json.dumps(solution(number).solve()))
    return copy.deepcopy(ANSWERS[number])


def page(number):
    (path,) = PAGES.glob(f"{number:02d}-*.md")
    return path.read_text(encoding="utf-8")


MISTAKES = [
    pytest.param(number, mistake, id=f"{number}-" + "-".join(f"{key}={value}" for key, value in mistake.items()))
    for number in TASKS
    for mistake in solution(number).WRONG
]


@pytest.mark.parametrize("number", TASKS)
def test_our_solution_is_accepted(number):
    assert check(number, answer(number)) == []


@pytest.mark.in_turn
@pytest.mark.parametrize(("number", "mistake"), MISTAKES)
def test_a_mistake_is_rejected(number, mistake):
    wrong = json.loads(json.dumps(solution(number).solve(**mistake)))
    assert check(number, wrong) != []


@pytest.mark.parametrize("number", TASKS)
def test_the_page_shows_the_fields_and_its_example_is_no_solution(number):
    (example,) = re.findall(r"^```json\n(.*?)^```", page(number), flags=re.MULTILINE | re.DOTALL)
    assert set(json.loads(example)) == set(answer(number))
    assert check(number, json.loads(example)) != []


@pytest.mark.parametrize("number", TASKS)
def test_a_missing_field_is_named(number):
    for name in answer(number):
        rest = answer(number)
        del rest[name]
        assert any(name in line for line in check(number, rest)), name


def test_decoding_in_a_loop_is_the_run_of_the_library():
    """The checks' own sampler against `denoise`: the canvases that all of them stand on."""
    import dlm_lens as dl

    model = loops.loaded("toy")
    for text in loops.prompts()[:3]:
        canvases, order = loops.decode(model, text, 24, 8)
        run = dl.denoise(model, text, gen_length=24, block_length=8, seed=0)
        assert [canvas.tolist() for canvas in canvases] == [canvas.tolist() for canvas in run.canvases]
        assert [int(one[0].nonzero()) for one in run.unmasked] == order


def test_the_command(tmp_path):
    command, given = [python(), str(PAGES / "check.py"), "12"], tmp_path / "answer.json"
    given.write_text(json.dumps(answer(12)))
    done = subprocess.run([*command, str(given)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "task 12: right\n"), done.stderr
    given.write_text(json.dumps(answer(12) | {"without_head": 3.5}))
    done = subprocess.run([*command, str(given)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "- without_head is 3.5, which is not right\n")
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be read as JSON" in done.stderr
