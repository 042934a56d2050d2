"""The prompts of the experiments: shipped problems, or a JSONL file of prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dlm_lens.evaluation
from dlm_lens.experiments.results import Settings

SHIPPED = {"toy_arithmetic": "A", "toy_lists": "L", "toy_facts": "F"}
"""Tasks that come with the package, in the language of the embedded models; task names of problems.jsonl."""


class Problem(NamedTuple):
    """A prompt and its correct answer."""

    prompt: str
    target: str


def problems(task: str) -> list[Problem]:
    """The problems of a shipped task, or of a JSONL file with `prompt` and, for accuracies, `target`.

    Raises:
        FileNotFoundError: neither a shipped task nor a file.
    """
    if task in SHIPPED:
        file, wanted = Path(dlm_lens.evaluation.__path__[0]) / "tasks" / "problems.jsonl", SHIPPED[task]
    elif Path(task).is_file():
        file, wanted = Path(task), None
    else:
        raise FileNotFoundError(f"{task!r} is neither a file of prompts nor one of {', '.join(SHIPPED)}")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Problem(line["prompt"], line.get("target", ""))
        for line in lines
        if wanted is None or line["task"] == wanted
    ]


def problems_of(settings: Settings, start: int = 0) -> list[Problem]:
    """The problems of one item: up to `batch`, from `start` on."""
    stop = min(start + settings["batch"], settings["prompts"])
    return problems(settings["task"])[start:stop]


def starts(settings: Settings) -> range:
    """The index of each item's first problem.

    Raises:
        ValueError: the task has fewer problems than `prompts`.
    """
    count = len(problems(settings["task"]))
    if not count:
        raise ValueError(f'{settings["task"]} holds no prompts; a line is {{"prompt": "..."}}')
    if not 1 <= settings["prompts"] <= count:
        raise ValueError(f"prompts is {settings['prompts']}; {settings['task']} has 1 to {count}")
    return range(0, settings["prompts"], settings["batch"])


def chat(model: Any, prompts: Sequence[str], settings: Settings) -> list[Any]:
    """The prompts as text, or as chats where the setting `chat` is True."""
    if not settings.get("chat"):
        return list(prompts)
    return [[{"role": "user", "content": prompt}] for prompt in prompts]
