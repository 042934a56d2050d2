"""The prompts of the experiments: shipped problems, or a JSONL file of prompts."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dlm_lens.evaluation.tasks import english, toy
from dlm_lens.experiments.results import Settings
from dlm_lens.files.json_objects import read_json_lines
from dlm_lens.printable import shown

SHIPPED: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "toy_arithmetic": partial(toy.documents, "A"), "toy_lists": partial(toy.documents, "L"),
    "toy_facts": partial(toy.documents, "F"), "english_arithmetic": english.word_problems,
    "english_prompts": english.prompts,
}  # fmt: skip
"""Documents of the tasks that come with the package. The embedded models know the toy language only;
`english_prompts` has no correct answers."""


def holds_problems(task: str) -> bool:
    """Whether a task is a shipped one or a JSONL file of problems, and not a task of lm-evaluation-harness."""
    return task in SHIPPED or Path(task).suffix == ".jsonl"


class Problem(NamedTuple):
    """A prompt and its correct answer.

    Args:
        prompt: the user's text.
        target: the correct answer; empty where there is none.
        begun: the beginning of the answer, which the model continues.
        solution: the written answer; empty where there is none.
    """

    prompt: str
    target: str
    begun: str = ""
    solution: str = ""


FORM = '{"prompt": "..."}'
"""Of a line of a file of problems."""


def problems(task: str) -> list[Problem]:
    """The problems of a shipped task, or of a JSONL file with `prompt` and, for accuracies, `target`.

    Raises:
        FileNotFoundError: neither a shipped task nor a file.
        ValueError: a line that is no problem.
    """
    if task in SHIPPED:
        return [_problem(line, "", task) for line in SHIPPED[task]()]
    if not Path(task).is_file():
        raise FileNotFoundError(
            f"{task!r} is neither a file of prompts (lines {FORM}) nor one of {', '.join(SHIPPED)}"
        )
    return [_problem(line, text, where) for where, text, line in read_json_lines(Path(task), "a problem", FORM)]


def solved_problems(task: str, experiment: str) -> list[Problem]:
    """The problems of a task that comes with written solutions, for an experiment of this name.

    Raises:
        FileNotFoundError: as `problems`.
        ValueError: as `problems`, or a problem without a solution.
    """
    found = problems(task)
    if not found or not all(problem.solution for problem in found):
        raise ValueError(f"task is {task!r}; {experiment} needs solutions: toy_arithmetic or another toy_ task")
    return found


def _problem(line: Any, text: str, where: str) -> Problem:
    fields = {"prompt": None, "target": "", "begun": "", "answer": ""}
    found: list[Any] = [
        line.get(name, default) if isinstance(line, dict) else None for name, default in fields.items()
    ]
    if not all(isinstance(value, str) for value in found):
        raise ValueError(
            f'{where} is {shown(text)}; a line is {FORM} and may have "target", "begun" and "answer", '
            "all of them texts"
        )
    return Problem(*found)


def is_right(task: str, answer: str, problem: Problem) -> bool:
    """Whether an answer is correct: of a shipped task its first number in English, its last "answer" else.

    Of a file's problem: the last "answer ... ." where the model wrote one; else the first whole number where the
    target is a number, and the whole text where it is none.
    """
    if task.startswith("toy_"):
        return toy.final_answer(answer) == problem.target
    if task in SHIPPED:
        return english.first_number(answer) == problem.target
    written = toy.final_answer(answer)
    if written is None:
        written = english.first_number(answer) if problem.target.isdecimal() else answer.strip()
    return written == problem.target


def problems_of(settings: Settings, start: int = 0) -> list[Problem]:
    """The problems of one item: up to `batch`, from `start` on."""
    stop = min(start + settings["batch"], settings["prompts"])
    return problems(settings["task"])[start:stop]


def starts(settings: Settings, *, graded: bool = False) -> range:
    """The index of each item's first problem.

    Args:
        settings: `task`, `prompts` and `batch`.
        graded: whether answers are compared with the problems' targets.

    Raises:
        ValueError: the task has fewer problems than `prompts`, or one without the target that grading needs.
    """
    task, found = settings["task"], problems(settings["task"])
    if not found:
        raise ValueError(f'{task} holds no prompts; a line is {{"prompt": "..."}}')
    if not 1 <= settings["prompts"] <= len(found):
        raise ValueError(f"prompts is {settings['prompts']}; {task} has 1 to {len(found)}")
    lacking = next((n for n, one in enumerate(found[: settings["prompts"]], 1) if not one.target), None)
    if graded and lacking is not None:
        raise ValueError(
            f'problem {lacking} of {task} has no "target", the correct answer that exact match compares with; add '
            "it, or take a task with answers, such as english_arithmetic"
        )
    return range(0, settings["prompts"], settings["batch"])


def chat(model: Any, these: Sequence[Problem], settings: Settings) -> list[Any]:
    """The prompts as text; where the setting `chat` is True as chats, or ids of chats with a begun answer.

    Raises:
        ValueError: a begun answer for a model without a chat template.
    """
    if not settings.get("chat"):
        return [" ".join(filter(None, (problem.prompt, problem.begun))) for problem in these]
    chats = [[{"role": "user", "content": problem.prompt}] for problem in these]
    if not any(problem.begun for problem in these):
        return chats
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template; run with chat=False")
    texts = model.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    # The template writes its own special tokens.
    return [
        model.tokenizer(text + problem.begun, add_special_tokens=False)["input_ids"]
        for text, problem in zip(texts, these, strict=True)
    ]
