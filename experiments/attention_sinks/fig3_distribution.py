"""Figure 3: how attention is distributed over tokens, at the beginning, in the middle and at the end of a run."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import watching
from dlm_lens.experiments.attention_sinks.watching import numbers, watch
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings

EDGES = [0.0, *np.round(np.geomspace(0.01, 100, 25), 4).tolist(), 1e6]
"""Bins of score, relative to uniform."""

PARTS = ("first third", "second third", "last third")
TOP = 0.04
"""The part of the tokens that eps = 3 lets pass at most, by the paper."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: counts of scores per third of the run, median score, what the top 4% receive together."""
    found: dict[str, Any] = {"counts": [], "median": [], "top": [], "below": []}
    for watched in watch(item, settings, bench):
        received = watched.received["all"]
        scores, shares = received.values[:, 0].float(), received.shares[:, 0].float()
        thirds = scores.tensor_split(3)
        found["counts"].append([np.histogram(part[~part.isnan()].numpy(), EDGES)[0].tolist() for part in thirds])
        known = scores[~scores.isnan()]
        found["median"].append(numbers(known.median()))
        found["below"].append(numbers((known < 1).float().mean()))
        defined = ~shares.isnan()
        count = (defined.sum(-1, keepdim=True) * TOP).round().clamp(min=1)
        rank = shares.nan_to_num(nan=-1).argsort(-1, descending=True).argsort(-1)
        top = shares.nan_to_num().masked_fill(rank >= count, 0).sum(-1)
        found["top"].append(numbers(top[defined.any(-1)].mean()))
    return found


def render(results: Results) -> Rendering:
    """Histograms, and the share of attention that the strongest 4% of the tokens take."""
    from dlm_lens.experiments.attention_sinks.drawing import lines

    curves = {}
    rows = []
    for model in results.models:
        counts = np.sum(results.listed("counts", model=model), 0)
        shares = counts / np.clip(counts.sum(1, keepdims=True), 1, None)
        for name, part in zip(PARTS, shares, strict=True):
            curves[f"{model}, {name}"] = list(zip([max(edge, 0.005) for edge in EDGES[:-1]], part, strict=True))
        rows.append([
            model, str(mean_over_prompts(results.listed("median", model=model))),
            str(mean_over_prompts(results.listed("below", model=model))), str(top_share(results, model)),
            str(len(results.listed("median", model=model))),
        ])  # fmt: skip
    head = [
        "model",
        "median score (1: uniform)",
        "keys below uniform",
        "attention of the top 4% of keys",
        "n prompts",
    ]
    table = Table("every head, step and key; scale: relative to uniform; 95% intervals over prompts", head, rows)
    figure = lines(curves, x="received attention (1: uniform; bins of equal ratio)", y="share of keys", log=True)
    return Rendering([table], {"distribution": figure}, list(findings(results)))


def top_share(results: Results, model: str) -> Interval:
    """What the strongest 4% of the keys of a pattern receive together, of all attention."""
    return mean_over_prompts(results.listed("top", model=model))


def findings(results: Results) -> Iterator[Finding]:
    """Few tokens, much attention."""
    for model in results.models:
        top, median = top_share(results, model), mean_over_prompts(results.listed("median", model=model))
        yield Finding(
            "only a few tokens receive a very high score, the majority close to zero",
            f"{model}: the top 4% receive {top}; the median key {median}",
            "agrees"
            if top.low > 3 * TOP and median.high < 1
            else "disagrees"
            if top.high < 3 * TOP
            else "undecided",
            "agreement is taken as three times their part and a median below uniform; "
            "the paper's figure has no numbers to compare with",
        )


EXPERIMENT = Experiment(
    name="fig3-distribution",
    shows="2510.15731, Figure 3",
    title="distribution of attention scores over tokens and steps",
    metric="received attention relative to uniform; share of attention that the top 4% of the keys receive",
    small={**watching.SMALL, "models": ["toy", "toy-ar"]},
    full={**watching.FULL, "models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    items=watching.items,
    run=run,
    render=render,
    cost=watching.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
