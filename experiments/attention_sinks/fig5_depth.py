"""Figure 5: the main sink's score in every head and layer, averaged over time."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded, sink_rule
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: [layer, head] mean score of the main sink, and sinks per layer."""
    import dlm_lens as dl

    found: dict[str, Any] = {"score": [], "positions": [], "followed": []}
    for prompt_run in record_prompts(item, settings, bench):
        profile = dl.sinks.sink_profile(prompt_run.received["all"], sink_rule(settings))
        found["score"].append(rounded(profile.score, 3))
        found["positions"].append(rounded(profile.positions, 3))
        found["followed"].append(
            rounded(dl.sinks.sink_profile(prompt_run.received["all"], sink_rule(settings), main="model").score, 3)
        )
    return found


def render(results: Results) -> Rendering:
    """Heat maps of layer x head, and a line per layer."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

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
    figure = heat_maps(panels, x="head", y="layer", bar="score of the main sink (1: uniform)")
    return Rendering([table], {"profile": figure}, list(_findings(results)))


def deepest_minus_first(results: Results, model: str, name: str) -> Interval:
    """Last layer minus first layer of "score" (mean over heads) or "positions", paired by prompt."""
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


EXPERIMENT = recorded_runs.experiment(
    name="fig5-depth",
    shows="2510.15731, Figure 5",
    title="score of the main sink over heads and layers",
    metric="received attention relative to uniform of each head's main sink, mean over steps",
    small={"models": ["toy", "toy-gated"]},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
