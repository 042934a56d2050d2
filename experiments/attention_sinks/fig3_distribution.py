"""Figure 3: distribution of received attention over tokens, for each third of a run."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings

EDGES = [0.0, *np.round(np.geomspace(0.01, 100, 25), 4).tolist(), 1e6]
"""Edges of the bins of received attention, relative to uniform."""

PARTS = ("first third", "second third", "last third")
TOP = 0.04
"""The largest share of tokens that are sinks at eps = 3, according to the paper."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: score counts per third of the run, the median score, and the attention of the top 4% of keys."""
    found: dict[str, Any] = {"counts": [], "median": [], "top": [], "below": []}
    for prompt_run in record_prompts(item, settings, bench):
        received = prompt_run.received["all"]
        scores, shares = received.values[:, 0].float(), received.shares[:, 0].float()
        thirds = scores.tensor_split(3)
        found["counts"].append([np.histogram(part[~part.isnan()].numpy(), EDGES)[0].tolist() for part in thirds])
        known = scores[~scores.isnan()]
        found["median"].append(rounded(known.median()))
        found["below"].append(rounded((known < 1).float().mean()))
        defined = ~shares.isnan()
        count = (defined.sum(-1, keepdim=True) * TOP).round().clamp(min=1)
        rank = shares.nan_to_num(nan=-1).argsort(-1, descending=True).argsort(-1)
        top = shares.nan_to_num().masked_fill(rank >= count, 0).sum(-1)
        found["top"].append(rounded(top[defined.any(-1)].mean()))
    return found


def render(results: Results) -> Rendering:
    """Histograms, and the share of attention that the top 4% of the keys receive."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

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
    figure = line_chart(
        curves, x="received attention (1: uniform; bins of equal ratio)", y="share of keys", log=True
    )
    return Rendering([table], {"distribution": figure}, list(findings(results)))


def top_share(results: Results, model: str) -> Interval:
    """The share of all attention that the top 4% of the keys of a pattern receive."""
    return mean_over_prompts(results.listed("top", model=model))


def findings(results: Results) -> Iterator[Finding]:
    """Whether few tokens receive much of the attention."""
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


EXPERIMENT = recorded_runs.experiment(
    name="fig3-distribution",
    shows="2510.15731, Figure 3",
    title="distribution of attention scores over tokens and steps",
    metric="received attention relative to uniform; share of attention that the top 4% of the keys receive",
    small={"models": ["toy", "toy-ar"]},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
