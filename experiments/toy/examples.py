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
class Example:
    """The example.

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


def choose(model: Any, examples: tuple[Example, ...]) -> Example:
    """The head whose sinks move in most of the prompts; of equals the one in front."""
    prompts = [one.prompt for one in examples]
    rec = dlm_lens.record(model, prompts, gen_length=LENGTH, block_length=BLOCK)
    paths = dlm_lens.trajectories(rec, RULE)
    summary = paths.summary(by="head")
    best = summary.iloc[int(summary["moving"].to_numpy().argmax())]
    kinds = paths.kinds[:, int(best["layer"]), int(best["head"])]
    return Example(examples, rec.run, paths, int(best["layer"]), int(best["head"]), int((kinds == "moving").sum()))


def knock_out(model: Any, shown: Example, control: int | None = None) -> Comparison:
    """The prompts with the head's sinks hidden, or (with the seed of a control) columns of the same mass."""
    hook = at_layers(at_heads(mask_sinks(RULE), [shown.head]), [shown.layer])
    hooks = [hook if control is None else mask_random(like=hook, match="mass", seed=control)]
    prompts = [one.prompt for one in shown.examples]
    return dlm_lens.compare(model, prompts, hooks=hooks, gen_length=LENGTH, block_length=BLOCK)


def right(run: DenoisingRun, examples: tuple[Example, ...]) -> int:
    """How many answers are the expected ones, word for word."""
    return sum(run.answers[i].strip() == one.answer.strip() for i, one in enumerate(examples))


def main(prompts: Annotated[int, typer.Option(help="Test prompts.")] = 16) -> None:
    """Choose the example and print what the README says of it."""
    torch.set_num_threads(1)
    model = dlm_lens.load(MODEL)
    shown = choose(model, drawn_examples(prompts))
    typer.echo(f"prompt: {shown.examples[0].prompt}\nanswer: {shown.run.answers[0]}")
    typer.echo(f"layer {shown.layer}, head {shown.head}: moving in {shown.moving} of {len(shown.examples)} prompts")
    table = shown.paths.table()
    here = (table["batch"] == 0) & (table["layer"] == shown.layer) & (table["head"] == shown.head)
    typer.echo(
        table[here][["position", "token", "first_step", "last_step", "peak", "main_steps"]].to_string(index=False)
    )
    typer.echo(f"right, plain: {right(shown.run, shown.examples)} of {len(shown.examples)}")
    for control in (None, 0, 1, 2):
        pair = knock_out(model, shown, control)
        name = "its sinks hidden" if control is None else f"columns of the same mass hidden, seed {control}"
        typer.echo(f"{name}: {right(pair.hooked, shown.examples)} right; the first: {pair.hooked.answers[0]}")


if __name__ == "__main__":
    typer.run(main)
