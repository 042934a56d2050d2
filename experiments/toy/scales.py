"""How many keys pass a sink rule on each scale and level: `python -m experiments.toy.scales`.

Prints the table of docs/sinks.md: the share of keys that are left out (Figure 10 of 2510.15731 plots this over eps)
and the share of patterns with a sink, for both embedded models, over test prompts of task A.
"""

from typing import Annotated

import torch
import typer
from torch import Tensor

import dlm_lens
from dlm_lens import AboveMean, AboveStd, AttentionShare, Received, Sinks
from dlm_lens.sinks import Detector, Level
from experiments.toy.corpus import TEST_SEED, held_out, training_prompts
from experiments.toy.statistics import Estimate, clustered_ratio, markdown_table

RULES: tuple[tuple[Detector, bool], ...] = (
    (AboveMean(1.0), True),
    (AboveMean(2.0), True),
    (AboveMean(3.0), True),
    (AboveMean(5.0), True),
    (AboveMean(3.0), False),
    (AboveMean(0.03, literal=True), True),
    (AboveStd(3.0), True),
    (AttentionShare(0.0618), True),
)
LEVELS: tuple[Level, ...] = ("head", "layer", "model")


def shares(found: Sinks) -> tuple[Estimate, Estimate]:
    """Keys left out, and patterns with a sink, with bootstrap intervals that draw whole prompts."""
    defined = ~found.scores.isnan()
    left_out = clustered_ratio(_per_prompt(defined & ~found.is_sink), _per_prompt(defined), bounds=(0, 1))
    judged = defined.any(-1)
    return left_out, clustered_ratio(
        _per_prompt(found.is_sink.any(-1) & judged), _per_prompt(judged), bounds=(0, 1)
    )


def _per_prompt(flags: Tensor) -> Tensor:
    return flags.double().transpose(0, 1).flatten(1).sum(1)


def rows(name: str, received: Received) -> list[list[str]]:
    """One row per rule and level."""
    found = []
    for rule, relative in RULES:
        for level in LEVELS:
            sinks = dlm_lens.find_sinks(received, rule, level=level, relative=relative)
            cells = [f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]" for e in shares(sinks)]
            found.append([name, f"`{rule}`", sinks.scale, level, *cells])
    return found


def main(prompts: Annotated[int, typer.Option(help="Test prompts of task A.")] = 32) -> None:
    """Measure both models and print the table."""
    torch.set_num_threads(1)
    examples = held_out("A", prompts, training_prompts(), TEST_SEED).examples
    table = []
    for name in ("toy", "toy-ar"):
        model = dlm_lens.load(name)
        run = dlm_lens.denoise(model, [example.prompt for example in examples])
        table += rows(name, dlm_lens.received_over_steps(model, run))
    head = ["model", "rule", "scale", "level", "keys left out", "maps with a sink"]
    typer.echo(f"n = {prompts} prompts, every step; intervals: 95%, bootstrap over prompts\n")
    typer.echo(markdown_table(head, table))


if __name__ == "__main__":
    typer.run(main)
