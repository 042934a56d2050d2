"""The example of the README and of `dlm-lens demo`, and the rule by which it was chosen.

`python -m experiments.toy.examples` prints it. Test prompts of task A with three lines of calculation (21 tokens),
written by `toy` on a canvas of exactly 21 positions, a line per block, so that no step writes an end of
text. The head: the one whose sinks move in most prompts (`summary(by="pattern")`). The prompt: the first one. Its
steps: the middle of each block. Then the head's sinks are hidden, and as a control random columns of the same mass.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

import dlm_lens
from dlm_lens import AboveMean, Comparison, DenoisingRun, Trajectories
from dlm_lens.hooks import at_heads, at_layers, mask_random, mask_sinks
from experiments.toy.corpus import TEST_SEED, held_out, training_prompts
from experiments.toy.language import Example

MODEL = "toy"
RULE = AboveMean(3.0)
LENGTH, BLOCK = 21, 7
DRAWN = 400
"""Test prompts among which those with an answer of `LENGTH` tokens are taken."""


@dataclass(frozen=True)
class MovingSinkExample:
    """The example of the README: prompts, their run, and the head whose sinks move in most of them.

    Args:
        examples: the prompts.
        run: their run.
        paths: their sinks over the steps.
        layer: of the head whose sinks move in most prompts.
        head: that head.
        moving: in how many prompts its pattern is "moving".
    """

    examples: tuple[Example, ...]
    run: DenoisingRun
    paths: Trajectories
    layer: int
    head: int
    moving: int


def drawn_examples(prompts: int = 16) -> tuple[Example, ...]:
    """The first test prompts of task A whose answer has `LENGTH` tokens."""
    drawn = held_out("A", DRAWN, training_prompts(), TEST_SEED).examples
    return tuple(one for one in drawn if len(one.answer.split()) == LENGTH)[:prompts]


def choose(model: Any, examples: tuple[Example, ...]) -> MovingSinkExample:
    """The head whose sinks move in most of the prompts; the first of equal ones."""
    prompts = [one.prompt for one in examples]
    rec = dlm_lens.record(model, prompts, gen_length=LENGTH, block_length=BLOCK)
    paths = dlm_lens.trajectories(rec, RULE)
    summary = paths.summary(by="head")
    best = summary.iloc[int(summary["moving"].to_numpy().argmax())]
    kinds = paths.kinds[:, int(best["layer"]), int(best["head"])]
    layer, head, moving = int(best["layer"]), int(best["head"]), int((kinds == "moving").sum())
    return MovingSinkExample(examples, rec.run, paths, layer, head, moving)


def knock_out(model: Any, example: MovingSinkExample, control: int | None = None) -> Comparison:
    """Compare the run with the head's sinks hidden, or (with a control's seed) random columns of the same mass."""
    hook = at_layers(at_heads(mask_sinks(RULE), [example.head]), [example.layer])
    hooks = [hook if control is None else mask_random(like=hook, match="mass", seed=control)]
    prompts = [one.prompt for one in example.examples]
    return dlm_lens.compare(model, prompts, hooks=hooks, gen_length=LENGTH, block_length=BLOCK)


def right(run: DenoisingRun, examples: tuple[Example, ...]) -> int:
    """The number of answers that equal the expected ones."""
    return sum(run.answers[i].strip() == one.answer.strip() for i, one in enumerate(examples))


def main(prompts: Annotated[int, typer.Option(help="Test prompts.")] = 16) -> None:
    """Choose the example and print the numbers of the README."""
    torch.set_num_threads(1)
    model = dlm_lens.load(MODEL)
    example = choose(model, drawn_examples(prompts))
    typer.echo(f"prompt: {example.examples[0].prompt}\nanswer: {example.run.answers[0]}")
    typer.echo(
        f"layer {example.layer}, head {example.head}: moving in {example.moving} of {len(example.examples)} prompts"
    )
    table = example.paths.table()
    here = (table["batch"] == 0) & (table["layer"] == example.layer) & (table["head"] == example.head)
    typer.echo(
        table[here][["position", "token", "first_step", "last_step", "peak", "main_steps"]].to_string(index=False)
    )
    typer.echo(f"right, plain: {right(example.run, example.examples)} of {len(example.examples)}")
    for control in (None, 0, 1, 2):
        pair = knock_out(model, example, control)
        name = "its sinks hidden" if control is None else f"columns of the same mass hidden, seed {control}"
        typer.echo(f"{name}: {right(pair.hooked, example.examples)} right; the first: {pair.hooked.answers[0]}")


if __name__ == "__main__":
    typer.run(main)
