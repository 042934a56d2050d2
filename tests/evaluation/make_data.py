"""Writes the data of the shipped tasks: `python -m tests.evaluation.make_data`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from experiments.toy.corpus import held_out, training_prompts
from experiments.toy.language import COLOURS, PLACES, Example, Task

DIRECTORY = Path(__file__).parents[2] / "dlm_lens/evaluation/tasks"
COUNT = 100
SEED = 7
"""Of the test prompts: others than those that the cards of the models were measured on (seed 1)."""


def problem(example: Example) -> dict[str, object]:
    """A line of problems.jsonl."""
    return {"task": example.task, "prompt": example.prompt, "answer": example.answer, "target": example.target}


def choices(example: Example, rng: random.Random) -> dict[str, object]:
    """A line of choices.jsonl: the look-up's answer among the values of the other animals and of none."""
    words = COLOURS if example.target in COLOURS else PLACES
    said = [word for word in dict.fromkeys(example.prompt.split()) if word in words]
    others = [word for word in said if word != example.target]
    spare = [word for word in words if word not in said]
    wrong = (others + rng.sample(spare, 3))[:3]
    options = rng.sample([example.target, *wrong], 4)
    written = [example.answer.replace(example.target, word) for word in options]
    return {"prompt": example.prompt, "choices": written, "gold": options.index(example.target)}


def write(name: str, lines: Sequence[dict[str, object]]) -> None:
    """One line of JSON per document."""
    (DIRECTORY / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write both files."""
    seen = training_prompts()
    tasks: tuple[Task, ...] = ("A", "L", "F")
    drawn = {task: held_out(task, COUNT, seen, seed=SEED).examples for task in tasks}
    write("problems.jsonl", [problem(example) for task in tasks for example in drawn[task]])
    rng = random.Random(SEED)
    write("choices.jsonl", [choices(example, rng) for example in drawn["F"]])


if __name__ == "__main__":
    main()
