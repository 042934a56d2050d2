"""What a model's learned sink token is worth: answers with it hidden, against controls.

`python -m experiments.toy.hidden_sink [--count 256]` prints the table of `docs/toy.md`: exact match on held-out
prompts of each task with nothing hidden, with the learned sink hidden from every query, and with random columns of
the canvas hidden in its place: as many, and as many as receive the same attention.
"""

from typing import Annotated, Any

import typer

import dlm_lens as dl
from dlm_lens.experiments.one_token.toy_language import TASKS, tests
from dlm_lens.hooks import mask_positions, mask_random, sink
from experiments.toy.corpus import TRAINING_SEQUENCES
from experiments.toy.evaluate import answers
from experiments.toy.language import is_correct
from experiments.toy.statistics import markdown_table, wilson


def conditions() -> dict[str, list[Any]]:
    """The hooks of every column of the table."""
    hidden = mask_positions(sink(0))
    return {
        "nothing": [],
        "its learned sink": [hidden],
        "as many random columns": [mask_random(like=hidden)],
        "random columns, the same attention": [mask_random(like=hidden, match="mass")],
    }


def measure(model: Any, count: int, rows: int = TRAINING_SEQUENCES) -> list[list[str]]:
    """A line for each task: exact match with its 95% interval (Wilson) under every condition.

    Args:
        model: with one learned sink token.
        count: prompts of each task.
        rows: sequences of the training text, whose prompts are left out of the tests.
    """
    lines = []
    for task in TASKS:
        examples = tests(task, count, rows)
        cells = []
        for hooks in conditions().values():
            given = answers(model, examples, hooks=hooks)
            right = wilson(
                sum(is_correct(text, each.target) for text, each in zip(given, examples, strict=True)), len(given)
            )
            cells.append(f"{right.value:.3f} [{right.low:.3f}, {right.high:.3f}]")
        lines.append([task, str(len(examples)), *cells])
    return lines


def main(
    model: Annotated[str, typer.Option(help="a model with a learned sink token")] = "toy-sink",
    count: Annotated[int, typer.Option(help="prompts of each task")] = 256,
) -> None:
    """Print the table."""
    typer.echo(markdown_table(["task", "prompts", *conditions()], measure(dl.load(model), count)))


if __name__ == "__main__":
    typer.run(main)
