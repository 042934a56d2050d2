"""Files of problems: lines as JSON lines have them, and sentences for those that are no problems."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dlm_lens.experiments import find_experiment, list_items, read_results, run_experiment
from dlm_lens.experiments.attention_sinks import table1
from dlm_lens.experiments.attention_sinks.problems import Problem, is_right, problems
from dlm_lens.experiments.results import check_config


def test_a_line_ends_with_a_newline_alone_and_may_be_empty(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u0085four", "five"]
    lines = [json.dumps({"prompt": text, "target": "5"}, ensure_ascii=False) for text in texts]
    (tmp_path / "task.jsonl").write_text("\n\n".join(lines) + "\n \n", encoding="utf-8")
    assert problems(str(tmp_path / "task.jsonl")) == [Problem(text, "5") for text in texts]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"question": "w1"}', r'task.jsonl line 2 is .*question.*; a line is \{"prompt": "..."\}'),
        ('{"prompt": "w1", "target": 5}', "line 2 is .*all of them texts"),
        ('["w1"]', "line 2 is .*; a line is"),
        ("w1", "task.jsonl line 2 is not JSON"),
        ("[" * 100_000, "line 2 is nested too deeply to be a problem"),
    ],
)
def test_a_wrong_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "task.jsonl").write_text('{"prompt": "w1"}\n' + line)
    with pytest.raises(ValueError, match=sentence):
        problems(str(tmp_path / "task.jsonl"))


def written(path: Path, lines: list[dict[str, str]]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize(
    ("answer", "target", "right"),
    [
        ("2 + 3 = 5 . answer 5 .", "5", True),  # the toy language: not its first number
        ("2 + 3 = 5 . answer 5 .", "2", False),
        ("5 cups, not 6", "5", True),
        ("It is 15.", "5", False),
        (" Paris\n", "Paris", True),
        ("Paris, France", "Paris", False),
    ],
)
def test_answers_to_a_file_s_problems(answer: str, target: str, right: bool) -> None:
    assert is_right("mine.jsonl", answer, Problem("w1", target)) is right


def test_table_1_of_the_prompts_of_a_file_is_that_of_the_shipped_ones(tmp_path: Path) -> None:
    """results.md: `--set task=FILE.jsonl` uses your own prompts."""
    shipped = problems("toy_arithmetic")[:2]
    task = written(tmp_path / "mine.jsonl", [{"prompt": one.prompt, "target": one.target} for one in shipped])
    given = {"prompts": 2, "batch": 2, "columns": [5], "variants": ["eps"], "varied": [1], "calibration": 2}
    found = []
    for number, name in enumerate(("toy_arithmetic", task)):
        out = tmp_path / str(number)
        results = run_experiment(
            table1.EXPERIMENT, out, small=True, models=["toy"], settings={**given, "task": name}
        )
        found.append([(dict(one.item), dict(one.value)) for one in results.records])
    assert found[0] == found[1]
    assert [sum(value["correct"]) for _, value in found[0]][:2] == [2, 0]


@pytest.mark.parametrize("name", ["table1-masking", "beyond-places", "beyond-context", "beyond-instruct"])
def test_exact_match_needs_correct_answers(name: str, tmp_path: Path) -> None:
    task = written(tmp_path / "mine.jsonl", [{"prompt": "w1", "target": "1"}, {"prompt": "w2"}])
    experiment = find_experiment(name)
    ways = ("masked_task", "masked_prompts") if name == "beyond-instruct" else ("task", "prompts")
    for value, number in ((task, 2), ("english_prompts", 1)):
        config = experiment.config(True, given=dict(zip(ways, (value, 2), strict=True)))
        with pytest.raises(ValueError, match=f'problem {number} of .* has no "target".*exact match'):
            list_items(experiment, config)
    few = experiment.config(True, given=dict(zip(ways, (task, 1), strict=True)))
    assert list_items(experiment, few)


def test_prompts_that_changed_are_not_mixed_with_the_stored_ones(tmp_path: Path) -> None:
    experiment, settings = find_experiment("fig5-depth"), {"prompts": 1, "batch": 1, "sampler": {"gen_length": 4}}
    lines = [{"prompt": "how many ? a :"}, {"prompt": "a :"}]
    task = written(tmp_path / "mine.jsonl", lines)

    def run() -> int:
        return len(run_experiment(experiment, tmp_path / "out", small=True, models=["toy"],
                                  settings={**settings, "task": task}).records)  # fmt: skip

    assert run() == run() == 1
    written(tmp_path / "mine.jsonl", lines[::-1])
    with pytest.raises(ValueError, match=r"holds results with files\..*mine.jsonl='[0-9a-f]{16}', and this"):
        run()
    written(tmp_path / "mine.jsonl", lines)
    assert run() == 1
    assert "files" not in experiment.config(True)

    from dlm_lens.files.sealed_json import line_of

    path = tmp_path / "out" / "results-00000.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    for line in stored:
        line.pop("checksum")
        line.get("config", {}).pop("files", None)
    path.write_bytes(b"".join(map(line_of, stored)))  # as before files had digests
    with pytest.raises(ValueError, match=r"results of an earlier version, .*mine.jsonl; it may have"):
        run()
    assert len(read_results(tmp_path / "out").records) == 1


def test_texts_that_changed_are_not_mixed_with_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of texts, and a file in ~, had no digest."""
    experiment, folder = find_experiment("beyond-conversion"), tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "notes.md").write_text("not read")
    monkeypatch.setenv("HOME", str(folder))
    places = {"text": {"": str(folder), "toy-ar": "~/a.txt"}, "trained": str(folder)}
    digest = hashlib.sha256(b"one").hexdigest()[:16]
    before = experiment.config(True, given=places)
    assert before["files"] == {str(folder / "a.txt"): digest, "~/a.txt": digest}
    (folder / "a.txt").write_text("two")
    with pytest.raises(ValueError, match=r"holds results with files\..*a.txt='[0-9a-f]{16}', and this run has"):
        check_config(tmp_path, before, experiment.config(True, given=places))


def test_files_of_overrides_that_changed_are_not_mixed_with_the_stored_ones(tmp_path: Path) -> None:
    """Their names are in settings of the training, `data.path=FILE`; patterns stand for all their files."""
    experiment = find_experiment("one-token-table1")
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_text(name)
    given = {"overrides": ["steps=2", f"data.path={tmp_path}/*.jsonl", f"data.eval_path={tmp_path}/c.txt"]}
    before = experiment.config(False, given=given)
    assert before["files"] == {
        f"{tmp_path}/{name}": hashlib.sha256(name.encode()).hexdigest()[:16]
        for name in ("a.jsonl", "b.jsonl", "c.txt")
    }
    (tmp_path / "b.jsonl").write_text("changed")
    with pytest.raises(ValueError, match=r"holds results with files\..*b.jsonl='[0-9a-f]{16}', and this run has"):
        check_config(tmp_path, before, experiment.config(False, given=given))


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("beyond-places", {"layers": [0, 4]}, r"'layer 4' of .* layers=\[0, 4\] .* layers go from 0 to 3"),
        ("beyond-places", {"layers": [-5]}, r"'layer -5' of .* layers=\[-5\] cannot run: .*layer -5 of 4"),
        ("beyond-freezing", {}, r"'followed from 4' .*steps=32 cannot run: .*the run has steps 0 to 13"),
        ("beyond-freezing", {"steps": 14}, "'frozen at 16' .*: step 16 is not there; the run has steps 0 to 13"),
    ],
)
def test_conditions_that_cannot_run_are_refused_before_any_condition(
    tmp_path: Path, name: str, settings: dict[str, Any], match: str
) -> None:
    short = {"prompts": 2, "batch": 2, "sampler": {"gen_length": 14}}
    with pytest.raises(ValueError, match=match):
        run_experiment(find_experiment(name), tmp_path, small=True, models=["toy"], settings={**short, **settings})
    assert '"item"' not in (tmp_path / "results-00000.jsonl").read_text()


def test_freezing_runs_with_another_length(tmp_path: Path) -> None:
    settings = {"prompts": 2, "batch": 2, "sampler": {"gen_length": 7}, "steps": 7, "from_steps": [3]}
    found = run_experiment(find_experiment("beyond-freezing"), tmp_path, small=True, settings=settings)
    assert [len(record.value["correct"]) for record in found.records] == [2] * 5
