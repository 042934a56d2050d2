"""Writes the data of the shipped tasks: `python -m tests.evaluation.make_data`."""

import random
from collections.abc import Sequence
from pathlib import Path

from experiments.toy.corpus import held_out, training_prompts
from experiments.toy.language import COLOURS, PLACES, Example, Task

FILE = Path(__file__).parents[2] / "dlm_lens/evaluation/tasks/problems.txt"
COUNT = 100
SEED = 7
"""Of the test prompts: others than those that the cards of the models were measured on (seed 1)."""


def problem(example: Example, options: Sequence[str] = ()) -> str:
    """A line of problems.txt, from which `dlm_lens.evaluation.tasks.toy` computes the answer."""
    return "\t".join((example.prompt, *options))


def options(example: Example, rng: random.Random) -> list[str]:
    """Four answers of a look-up: its own, and values of the other animals and of none."""
    words = COLOURS if example.target in COLOURS else PLACES
    said = [word for word in dict.fromkeys(example.prompt.split()) if word in words]
    others = [word for word in said if word != example.target]
    spare = [word for word in words if word not in said]
    wrong = (others + rng.sample(spare, 3))[:3]
    return rng.sample([example.target, *wrong], 4)


def data() -> str:
    """One line per problem."""
    seen, rng = training_prompts(), random.Random(SEED)
    tasks: tuple[Task, ...] = ("A", "L", "F")
    drawn = [example for task in tasks for example in held_out(task, COUNT, seen, seed=SEED).examples]
    lines = [problem(one, options(one, rng) if one.task == "F" else ()) for one in drawn]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(data(), encoding="utf-8")
