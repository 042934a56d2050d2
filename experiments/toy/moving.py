"""How the embedded models' sinks move: `python -m experiments.toy.moving [--prompts 16]`.

Prints the tables of docs/trajectories.md: test prompts of task A, every step of the default run, Eq. 3 with eps = 3
relative to uniform attention, per head, and the movement of the AR baseline also on column sums; 95% intervals from
a bootstrap over prompts; one trained model each.
"""

from typing import Annotated

import pandas as pd
import torch
import typer

import dlm_lens
from dlm_lens import AboveMean, Trajectories
from dlm_lens.sinks import position_enrichment, position_or_token, token_enrichment, trajectories
from experiments.toy.corpus import TEST_SEED, held_out, training_prompts
from experiments.toy.statistics import markdown_table

MODELS = ("toy", "toy-sink", "toy-gated", "toy-ar")
COLUMNS = ("patterns", "none", "static", "moving", "unsettled", "life", "transient", "moves",
"moves_right", "jump",
           "switches", "moved_over_run", "drift", "drift_right", "variance")  # fmt: skip
RULE = AboveMean(3.0)


def of_model(name: str, prompts: list[str]) -> dict[str, list[list[str]]]:
    """Rows of every table for one model."""
    model = dlm_lens.load(name)
    run = dlm_lens.denoise(model, prompts)
    received = dlm_lens.received_over_steps(model, run)
    paths = trajectories(received, RULE)
    movement = [[name, *_movement(paths)]]
    if run.autoregressive:
        # In a bidirectional pass the two scales are one.
        movement.append([f"{name}, column sums", *_movement(trajectories(received.on_scale("column sum"), RULE))])
    probe = position_or_token(model, run, RULE, steps=[0, run.steps // 2, -1])
    return {
        "movement": movement,
        "tokens": _enriched(name, token_enrichment(paths, eos_token_ids=run.eos_token_ids)),
        "places": _enriched(name, position_enrichment(paths)),
        "position or token": [
            [name, line["change"], *(_interval(line, key) for key in ("token", "position", "both", "neither")),
             str(line["n"])]
            for line in probe.summary().to_dict("records")
        ],
    }  # fmt: skip


def _movement(paths: Trajectories) -> list[str]:
    (line,) = paths.summary("all").to_dict("records")
    return [f"{line[name]:.0f}" if name == "patterns" else f"{line[name]:.2f}" for name in COLUMNS]


def _enriched(name: str, table: pd.DataFrame) -> list[list[str]]:
    return [
        [
            name,
            line["class"],
            f"{line['share']:.3f}",
            f"{line['base']:.3f}",
            _interval(line, "enrichment", "low", "high"),
        ]
        for line in table.to_dict("records")
    ]


def _interval(line: dict, key: str, low: str = "", high: str = "") -> str:
    return f"{line[key]:.2f} [{line[low or f'{key}_low']:.2f}, {line[high or f'{key}_high']:.2f}]"


def main(prompts: Annotated[int, typer.Option(help="Test prompts of task A.")] = 16) -> None:
    """Measure all embedded models and print the tables."""
    torch.set_num_threads(1)
    examples = held_out("A", prompts, training_prompts(), TEST_SEED).examples
    heads = {
        "movement": ["model", *COLUMNS],
        "tokens": ["model", "class", "share", "base", "enrichment"],
        "places": ["model", "place", "share", "base", "enrichment"],
        "position or token": ["model", "change", "token", "position", "both", "neither", "n"],
    }
    tables: dict[str, list[list[str]]] = {title: [] for title in heads}
    for name in MODELS:
        for title, rows in of_model(name, [example.prompt for example in examples]).items():
            tables[title] += rows
    typer.echo(f"n = {prompts} prompts, every step; rule: {RULE}, relative to uniform, per head")
    for title, head in heads.items():
        typer.echo(f"\n{title}\n\n{markdown_table(head, tables[title])}")


if __name__ == "__main__":
    typer.run(main)
