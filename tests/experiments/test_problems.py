"""Files of problems: lines as JSON lines have them, and sentences for those that are no problems."""

import json
from pathlib import Path

import pytest

from dlm_lens.experiments.attention_sinks.problems import Problem, problems


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
