"""Figure 5: the main sink's score in every head and layer, averaged over time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import watching
from dlm_lens.experiments.attention_sinks.watching import numbers, rule, watch
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: [layer, head] mean score of the main sink, and sinks per layer."""
    import dlm_lens as dl

    found: dict[str, Any] = {"score": [], "positions": [], "followed": []}
    for watched in watch(item, settings, bench):
        profile = dl.sinks.sink_profile(watched.received["all"], rule(settings))
        found["score"].append(numbers(profile.score, 3))
        found["positions"].append(numbers(profile.positions, 3))
        found["followed"].append(
            numbers(dl.sinks.sink_profile(watched.received["all"], rule(settings), main="model").score, 3)
        )
    return found


def render(results: Results) -> Rendering:
    """Heat maps of layer x head, and a line per layer."""
    from dlm_lens.experiments.attention_sinks.drawing import heat

    rows, panels = [], {}
    for model in results.models:
        scores = _array(results.listed("score", model=model))
        panels[model] = np.nanmean(scores, 0).tolist()
        positions = results.listed("positions", model=model)
        rows += [
            [model, str(layer), str(mean_over_prompts(np.nanmean(scores[:, layer], -1).tolist())),
             str(mean_over_prompts([found[layer] for found in positions])), str(len(scores))]
            for layer in range(scores.shape[1])
        ]  # fmt: skip
    head = ["model", "layer", "score of the main sink, mean over heads", "positions that are a sink in some head",
            "n prompts"]  # fmt: skip
    table = Table(
        "each head's own main sink; relative to uniform; mean over steps; 95% intervals over prompts", head, rows
    )
    figure = heat(panels, x="head", y="layer", bar="score of the main sink (1: uniform)")
    return Rendering([table], {"profile": figure}, list(_findings(results)))


def deepest_minus_first(results: Results, model: str, name: str) -> Interval:
    """Last layer minus first layer, paired by prompt: "score" (mean over heads) or "positions"."""
    values = _array(results.listed(name, model=model))
    values = np.nanmean(values, -1) if values.ndim == 3 else values
    return mean_over_prompts((values[:, -1] - values[:, 0]).tolist())


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        fewer, higher = (deepest_minus_first(results, model, name) for name in ("positions", "score"))
        yield Finding(
            "LLaDA: fewer sinks in deeper layers, one or two per layer",
            f"{model}: last minus first layer {fewer} positions",
            "agrees" if fewer.high < 0 else "disagrees" if fewer.low > 0 else "undecided",
            "four layers here, 32 in the paper",
        )
        yield Finding(
            "LLaDA: in later layers the sink's score is higher",
            f"{model}: last minus first layer {higher}",
            "agrees" if higher.low > 0 else "disagrees" if higher.high < 0 else "undecided",
            "",
        )


def _array(values: list[Any]) -> Any:
    return np.asarray(values, dtype=float)


EXPERIMENT = Experiment(
    name="fig5-depth",
    shows="2510.15731, Figure 5",
    title="score of the main sink over heads and layers",
    metric="received attention relative to uniform of each head's main sink, mean over steps",
    small={**watching.SMALL, "models": ["toy", "toy-gated"]},
    full={**watching.FULL, "models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    items=watching.items,
    run=run,
    render=render,
    cost=watching.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
