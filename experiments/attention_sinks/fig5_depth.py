"""Figure 5: the main sink's score in every head and layer, averaged over time."""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    per_network,
    per_prompt,
    record_prompts,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import RATE, Judged, is_above, is_below

SCALES = ("relative", "raw")
PERMUTATIONS = 10_000


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and scale: [layer, head] mean score of a head's and of the model's main sink; sinks per layer."""
    from dlm_lens.sinks import sink_profile

    names = ("score", "followed", "positions")
    found: dict[str, Any] = {f"{scale} {name}": [] for scale in SCALES for name in names}
    for prompt_run in record_prompts(item, settings, bench):
        for scale in SCALES:
            received = prompt_run.received["all"]
            received = received if scale == "relative" else received.on_scale("column sum")
            own, model = (sink_profile(received, sink_rule(settings), main=main) for main in ("head", "model"))
            for name, values in (("score", own.score), ("followed", model.score), ("positions", own.positions)):
                found[f"{scale} {name}"].append(rounded(values, 3))
    return found


def render(results: Results) -> Rendering:
    """Heat maps of layer x head, the curves over layers, and their trends."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps, line_chart

    rows, panels, trends = [], {}, []
    curves: dict[str, dict[str, list[tuple[int, Interval]]]] = {"score": {}, "positions": {}}
    for model, scale in shown(results):
        name = model if scale == "relative" else f"{model}, column sums"
        networks = per_network(results, f"{scale} followed", model=model)
        panels[name] = np.nanmean(_array(networks[0]), 0).tolist()
        for quantity in curves:
            curves[quantity][name] = [
                (layer, at_layer(results, model, scale, quantity, layer)) for layer in range(len(panels[name]))
            ]
            rho = trend(results, model, scale, quantity)
            chance, p = permuted(results, model, scale, quantity)
            trends.append([name, quantity, f"{rho}", f"±{chance:.2f}", f"{p:.3f}", str(rho.n)])
        rows += [
            [name, str(layer), *(str(curves[quantity][name][layer][1]) for quantity in curves)]
            for layer in range(len(panels[name]))
        ]
    tables = [
        Table("Spearman's correlation with the layer, a mean over prompts, beside the range of 95% of the "
              "permutations of the layers (of each network on its own), and two-sided p of these",
              ["model", "quantity", "correlation", "layers permuted", "p", "n"], trends),
        Table("each head's own main sink, a mean over heads and steps (1: uniform), and positions that are a sink "
              "in some head; 95% intervals",
              ["model", "layer", "score", "positions"], rows),
    ]  # fmt: skip
    ticks = [str(layer) for layer in range(max(map(len, panels.values())))]
    ticks = ticks if len(ticks) <= 12 else []
    figures = {
        "heads": heat_maps(panels, x="head", y="layer", bar="score of the model's main sink"),
        "score": line_chart(curves["score"], x="layer", y="score of the main sink, mean over heads", ticks=ticks),
        "positions": line_chart(curves["positions"], x="layer", y="positions that are a sink", ticks=ticks),
    }
    return Rendering(tables, figures, list(findings(results)))


def shown(results: Results) -> list[tuple[str, str]]:
    """Models and scales; in a DLM both scales give the same numbers."""
    return [(m, scale) for m in results.models for scale in (SCALES if results.is_causal(m) else SCALES[:1])]


def of_layers(value: Any) -> Any:
    """One prompt's curve over layers: positions, or the mean score over heads."""
    values = _array(value)
    return np.nanmean(values, -1) if values.ndim == 2 else values


def at_layer(results: Results, model: str, scale: str, quantity: str, layer: int) -> Interval:
    """The mean of a quantity at a layer; a count or a score is not negative."""
    name = f"{scale} {quantity}"
    return per_prompt(results, model, [name], lambda value: (of_layers(value)[layer], 1.0), bounds=(0, math.inf))


def standard_ranks(values: Sequence[float]) -> Any:
    """Ranks (of equal values their mean), centred, with length 1; zeros where all values are equal."""
    given = _array(values)
    ranks = (given[:, None] > given).sum(1) + (given[:, None] == given).sum(1) / 2
    centred = ranks - ranks.mean()
    length = np.sqrt((centred**2).sum())
    return centred / length if length else centred


def trend(results: Results, model: str, scale: str, quantity: str) -> Interval:
    """Spearman's correlation of a quantity with the layer, a mean over prompts; 0 where all layers are equal."""

    def terms(value: Any) -> tuple[float, float]:
        ranks = standard_ranks(of_layers(value))
        return float(ranks @ standard_ranks(range(len(ranks)))), 1.0

    return per_prompt(results, model, [f"{scale} {quantity}"], terms, bounds=(-1, 1))


def permuted(results: Results, model: str, scale: str, quantity: str) -> tuple[float, float]:
    """The correlation that 95% of the permutations of the layers stay within, and the two-sided p of the real one.

    A network has its layers once for all prompts, so that prompts say nothing about the order being by chance. The
    layers of each network are permuted on their own: every combination if there are at most 20,000, else 10,000
    random ones, with the real one among them.
    """
    networks = per_network(results, f"{scale} {quantity}", model=model)
    means = [np.mean([standard_ranks(of_layers(value)) for value in network], 0) for network in networks]
    layers = len(means[0])
    order = standard_ranks(range(layers))
    if math.factorial(layers) ** len(means) <= 2 * PERMUTATIONS:
        every = np.array(list(permutations(order)))
        each = [every @ one for one in means]
        drawn = np.array([sum(parts) for parts in product(*each)]) / len(means)
    else:
        generator = np.random.default_rng(0)
        orders = [
            np.concatenate([[order], generator.permuted(np.tile(order, (PERMUTATIONS - 1, 1)), axis=1)])
            for _ in means
        ]
        drawn = np.mean([some @ one for some, one in zip(orders, means, strict=True)], 0)
    real = float(np.mean([order @ one for one in means]))
    return float(np.quantile(abs(drawn), 1 - RATE)), float((abs(drawn) >= abs(real) - 1e-9).mean())


def judged(results: Results, model: str, scale: str, quantity: str, rises: bool) -> Judged:
    """A trend needs its interval over prompts (and networks) on one side, and few permutations as strong."""
    rho = trend(results, model, scale, quantity)
    found = is_above(rho, 0) if rises else is_below(rho, 0)
    _, p = permuted(results, model, scale, quantity)
    both = None if found.p is None else max(found.p, p)
    return Judged(found.verdict if p < RATE else "undecided", both)


def findings(results: Results) -> Iterator[Finding]:
    """Fewer sinks and higher scores in deeper layers, as trends over all layers."""
    for model, scale in shown(results):
        where = model if scale == "relative" else f"{model}, column sums"
        last = len(of_layers(results.listed(f"{scale} positions", model=model)[0])) - 1
        for quantity, rises, claim, words in (
            ("positions", False, "LLaDA: fewer sinks in deeper layers, one or two per layer", "positions"),
            ("score", True, "LLaDA: in later layers the sink's score is higher", "the score"),
        ):
            chance, p = permuted(results, model, scale, quantity)
            first, deepest = (at_layer(results, model, scale, quantity, layer) for layer in (0, last))
            least = 2 / math.factorial(last + 1) ** len(per_network(results, f"{scale} {quantity}", model=model))
            yield Finding.of(
                claim,
                f"{where}: correlation of {words} with the layer {trend(results, model, scale, quantity)}; "
                f"{first} in layer 0, {deepest} in layer {last}",
                judged(results, model, scale, quantity, rises),
                why="agreement: a correlation on this side of 0 that fewer than 5% of the permutations of the "
                "layers reach" + (f"; the least p of {last + 1} layers is {least:.2f}" if least >= RATE else ""),
                null=f"layers permuted: 95% within ±{chance:.2f}, p = {p:.3f}",
            )


def _array(values: Any) -> Any:
    return np.asarray(values, dtype=float)


EXPERIMENT = recorded_runs.experiment(
    name="fig5-depth",
    shows="2510.15731, Figure 5",
    title="score of the main sink over heads and layers",
    metric="received attention of the main sink, mean over steps; positions that are a sink; trends over layers",
    small={"models": ["toy", "toy-gated"]},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
