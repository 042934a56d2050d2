"""Paired seeds of the plain, sink-token and gated models: `python -m experiments.toy.seeds --runs runs/seeds`.

Runs with one seed see the same batches and masks, so that their losses differ by the model alone. The budget is
smaller than the shipped checkpoints'. A killed sweep goes on by the same command; `--only` takes a part of it, so
that two processes can share the work. The numbers go to `experiments/toy/results/seeds.json`, and
`docs/toy.md` holds the table that this module prints.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer

import dlm_lens
from dlm_lens.experiments import intervals
from experiments.toy.corpus import TEST_SEED, Corpus, HeldOut, build_corpus, held_out
from experiments.toy.evaluate import answers
from experiments.toy.language import is_correct
from experiments.toy.phenomena import differs, replay
from experiments.toy.statistics import markdown_table, wilson
from experiments.toy.train import RECORD_FILE, Settings, train

VARIANTS = ("toy", "toy-sink", "toy-gated")
RESULTS = Path(__file__).parent / "results" / "seeds.json"
LAST_POINTS = 4


def measure(directory: Path, tests: dict[str, HeldOut], prompts: int = 16) -> dict[str, Any]:
    """Loss at the end, exact match per task (block 8), and how often the main sink moves."""
    model = dlm_lens.load(directory)
    curve = json.loads((directory / RECORD_FILE).read_text())["progress"]["loss_curve"]
    correct = {}
    for task, test in tests.items():
        given = answers(model, test.examples)
        right = sum(is_correct(text, e.target) for text, e in zip(given, test.examples, strict=True))
        correct[task] = asdict(wilson(right, len(given)))
    run = dlm_lens.denoise(model, [e.prompt for e in tests["A"].examples[:prompts]], seed=0)
    maps = replay(model, run)
    found = {"loss": mean(loss for _, loss in curve[-LAST_POINTS:]), "correct": correct}
    found["main_sink_differs"] = asdict(differs(maps.score))
    if model.config.to_dict().get("num_sinks"):
        exempt = maps.score[..., : -model.config.num_sinks]
        found["main_sink_differs_exempted"] = asdict(differs(exempt))
        share = maps.column_sum[..., -1] / maps.column_sum.nansum(-1)
        found["sink_share_per_layer"] = share.mean((0, 1, 3)).tolist()
    return found


def paired(results: dict[str, dict[str, Any]], variant: str, seeds: list[int]) -> list[float]:
    """Differences of the final loss to the plain model's, seed by seed."""
    both = [s for s in seeds if f"{variant}-{s}" in results and f"toy-{s}" in results]
    return [results[f"{variant}-{s}"]["loss"] - results[f"toy-{s}"]["loss"] for s in both]


def over_seeds(values: list[float], digits: int) -> str:
    """`mean ± half of the 95% interval` over runs (Student's t), the mean alone for a single run."""
    return intervals.plus_minus(intervals.over_seeds(values), digits)


def table(results: dict[str, dict[str, Any]], seeds: list[int], steps: int) -> str:
    """The comparison as Markdown; every interval is over seeds."""
    rows = []
    for variant in VARIANTS:
        own = [results[f"{variant}-{seed}"] for seed in seeds if f"{variant}-{seed}" in results]
        if not own:
            continue
        change = "-" if variant == "toy" else over_seeds(paired(results, variant, seeds), 3)
        correct = [over_seeds([r["correct"][task]["value"] for r in own], 2) for task in own[0]["correct"]]
        moved = over_seeds([r["main_sink_differs"]["value"] for r in own], 2)
        exempt = [r["main_sink_differs_exempted"]["value"] for r in own if "main_sink_differs_exempted" in r]
        loss = over_seeds([r["loss"] for r in own], 3)
        rows.append(
            [f"`{variant}`", str(len(own)), loss, change, *correct, moved, over_seeds(exempt, 2) if exempt else "-"]
        )
    tasks = [f"exact match {task}" for task in ("A", "L", "F")]
    moves = ["main sink differs, first to last step", "the same, learned sink exempted"]
    head = ["model", "seeds", f"loss, last 200 of {steps:,} steps", "paired difference to `toy`", *tasks, *moves]
    return markdown_table(head, rows)


def main(
    runs: Annotated[Path, typer.Option(help="Directory for the runs.")] = Path("runs/seeds"),
    steps: Annotated[int, typer.Option(help="Optimiser steps of every run.")] = 1000,
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, ....")] = 5,
    tests: Annotated[int, typer.Option(help="Test prompts per task.")] = 64,
    only: Annotated[str, typer.Option(help="Train these seeds only, such as 0,1,2; nothing is measured.")] = "",
) -> None:
    """Train what is missing, measure, and print the table."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    everyone = list(range(seeds))
    chosen = [int(seed) for seed in only.split(",")] if only else everyone
    corpus, seen = build_corpus()
    train_all(corpus, runs, chosen, steps)
    if only:
        return
    held = {task: held_out(task, tests, seen, TEST_SEED) for task in ("A", "L", "F")}
    names = [f"{variant}-{seed}" for variant in VARIANTS for seed in everyone]
    results = {name: measure(runs / name, held) for name in names}
    RESULTS.write_text(json.dumps({"steps": steps, "runs": results}, indent=1) + "\n")
    typer.echo(table(results, everyone, steps))


def train_all(corpus: Corpus, runs: Path, seeds: list[int], steps: int) -> None:
    """Every variant with every seed; finished runs are left alone."""
    for seed in seeds:
        for variant in VARIANTS:
            directory = runs / f"{variant}-{seed}"
            if not (directory / "model.safetensors").exists():
                torch.compiler.reset()
                train(Settings(variant, seed=seed, steps=steps), directory, corpus)


if __name__ == "__main__":
    typer.run(main)
