"""Figure 1: the attention that every token receives at every step, and whether the largest sink moves."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import average, ratio, record_prompts, rounded, sink_rule
from dlm_lens.experiments.attention_sinks.two_scales import (
    BESIDE,
    NAMED,
    PLOTTED,
    SCALES,
    differ_in_random_order,
    followed,
    pairs,
    uniform_attention,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, unpaired_difference
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

NO_EXCESS = 0.0
"""Bound of "sinks shift as tokens are unmasked": more often than between two random steps of the same run."""

NO_DIFFERENCE = 0.0
"""Bound of "unlike autoregressive models": the DLM's share minus the AR model's."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and scale: patterns whose largest sink ends elsewhere, also by chance and under uniform attention.

    Of the first prompt also the maps of the figure.
    """
    names = ("moved", "compared", "chance", "beyond", "distinct", "strongest", "uniform moved", "uniform compared")
    found: dict[str, Any] = {f"{scale} {name}": [] for scale in SCALES for name in names}
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        received = prompt_run.received["all"]
        paths = followed(received, sink_rule(settings))
        even = followed(uniform_attention(received), sink_rule(settings))
        for scale, unit in SCALES.items():
            best = received.on_scale(unit).at_level("model").values[:, 0, 0, 0].nan_to_num(nan=-1.0)
            known = best.amax(-1) >= 0
            main = paths[scale].main.flatten(1).numpy()
            ends = paths[scale].measures["moved_over_run"].to_numpy()
            compared = np.isfinite(ends)
            chance = float(differ_in_random_order(main[:, compared]).sum())
            values = {
                "moved": int(ends[compared].sum()), "compared": int(compared.sum()), "chance": chance,
                "beyond": float(ends[compared].sum()) - chance,
                "distinct": len(set(best.argmax(-1)[known].tolist())),
                "strongest": float(best.amax(-1)[known].mean()),
                "uniform moved": int(even[scale].measures["moved_over_run"].sum()),
                "uniform compared": int(even[scale].measures["moved_over_run"].count()),
            }  # fmt: skip
            for name, value in values.items():
                found[f"{scale} {name}"].append(rounded(value))
        if item["start"] == 0 and number == 0 and not item.get("network", 0):
            found["maps"] = _maps(received, paths)
    return found


def _maps(received: Any, paths: Any) -> list[dict[str, Any]]:
    """Maps [step, position] of the mean of all heads and of one head; relative too where the scales differ.

    The head: of those whose largest sink ends elsewhere the one with the largest smaller end; where there is none,
    the one whose largest sink is strongest on average. None where no key has a score.
    """
    sums = received.on_scale(SCALES[PLOTTED])
    there = ~sums.at_level("model").values[:, 0, 0, 0].isnan().all(0)
    if not there.any():  # of a short canvas enough queries see no key
        return []
    score = paths[PLOTTED].main_score[:, 0].nan_to_num(nan=0.0)
    moved = paths[PLOTTED].measures["moved_over_run"].to_numpy().reshape(score.shape[1:]) == 1
    # A step without a score, such as the first of an AR prefix, is no end.
    steps = paths[PLOTTED].defined[:, 0].flatten(1).any(1).nonzero().flatten()
    ends = np.minimum(score[steps[0]].numpy(), score[steps[-1]].numpy())
    rank = np.where(moved, ends, -1) if moved.any() else score.mean(0).numpy()
    layer, head = (int(n) for n in np.unravel_index(int(rank.argmax()), rank.shape))
    named = {"mean of all heads": None, f"layer {received.layers[layer]}, head {head}": (layer, head)}
    differ = not bool((received.values.isnan() | (received.expected - 1).abs().lt(0.1)).all())
    found = []
    for scale in SCALES if differ else (PLOTTED,):
        held = received.on_scale(SCALES[scale])
        for name, place in named.items():
            values = held.at_level("model").values[:, 0, 0, 0] if place is None else held.values[:, 0, *place]
            found.append({"scale": scale, "of": name, "values": rounded(values[:, there], 2)})
    return found


def render(results: Results) -> Rendering:
    """The maps of each model's first prompt, and how often the largest sink moves."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    rows, panels = [], {}
    for model in results.models:
        rows += [_row(results, model, scale) for scale in SCALES]
        for record in results.where(model=model, start=0):
            for one in record.value.get("maps", ()):
                panels[f"{model}, {one['of']}: {SCALES[one['scale']]}"] = _with_nan(one["values"])
    head = ["model", "scale", "places of the strongest key over the run", "its score",
            "patterns whose largest sink ends elsewhere", "between random steps", "uniform attention",
            "n runs"]  # fmt: skip
    table = Table("mean pattern for places and score, every head for the other columns; 95% intervals over prompts "
                  "(and networks)", head, rows)  # fmt: skip
    figures = {"incoming": heat_maps(panels, x="position", y="step", bar="received attention")} if panels else {}
    return Rendering([table], figures, list(_findings(results)), [
        "What to see: a sink is a vertical line; it ends, and another begins, where a sink moves. The paper plots "
        "column sums (1: uniform attention without a mask). In the AR model's column sums the first keys are "
        "bright by the causal mask alone; relative to uniform attention they are not. A learned sink token is "
        "the last column.",
        BESIDE,
    ])  # fmt: skip


def _row(results: Results, model: str, scale: str) -> list[str]:
    compared = results.listed(f"{scale} compared", model=model)
    places = average(results, model, f"{scale} distinct", bounds=(1, np.inf))
    score = average(results, model, f"{scale} strongest", bounds=(0, np.inf))
    return [
        model, NAMED[scale], str(places), str(score), f"{moved(results, model, scale)} of {sum(compared)}",
        str(chance(results, model, scale)), _uniform(results, model, scale), str(len(compared)),
    ]  # fmt: skip


def moved(results: Results, model: str, scale: str = PLOTTED) -> Interval:
    """Of the patterns with a sink at the first and the last step, the share whose largest sink moved."""
    return ratio(results, model, f"{scale} moved", f"{scale} compared", bounds=(0, 1))


def chance(results: Results, model: str, scale: str = PLOTTED) -> Interval:
    """The same share for two random steps of the run, `differ_in_random_order`."""
    return ratio(results, model, f"{scale} chance", f"{scale} compared", bounds=(0, 1))


def _uniform(results: Results, model: str, scale: str) -> str:
    """The same for uniform attention under the model's mask, one pattern per prompt."""
    moving, n = (sum(results.listed(f"{scale} uniform {name}", model=model)) for name in ("moved", "compared"))
    return f"{moving / n:.2f} of {n}" if n else "no sink at both ends"


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.diffusion_models:
        n = sum(results.listed(f"{PLOTTED} compared", model=model))
        beyond = ratio(results, model, f"{PLOTTED} beyond", f"{PLOTTED} compared", bounds=(-1, 1))
        yield Finding.of(
            "DLM sinks shift across the sequence as tokens are unmasked (caption)",
            f"{model}: in {moved(results, model)} of {n} patterns the largest sink ends elsewhere, "
            f"{beyond} more than between two random steps of the run",
            is_above(beyond, NO_EXCESS),
            why="more often than between random steps; without sink tokens both scales are one in a DLM",
            null=f"steps in random order: {chance(results, model)}",
        )
    for model, baseline, scale in pairs(results):
        one, other = (moved(results, name, scale) for name in (model, baseline))
        n = sum(results.listed(f"{scale} compared", model=baseline))
        apart = unpaired_difference(one, other)
        yield Finding.of(
            "unlike autoregressive models (caption)",
            f"{NAMED[scale]}: {model} {one}, {baseline} {other} of {n} patterns; difference {apart}",
            is_above(apart, NO_DIFFERENCE),
            why="the DLM's share minus the AR model's is above 0"
            + ("" if n else "; the AR model has no pattern with a sink at both ends of the run"),
            null=f"{baseline}'s mask with uniform attention: {_uniform(results, baseline, scale)}"
            + ("; in a longer prefix a static first key (Figure 4)" if scale == PLOTTED else ""),
        )


def _with_nan(rows: list[list[float | None]]) -> list[list[float]]:
    return [[float("nan") if value is None else value for value in row] for row in rows]


EXPERIMENT = recorded_runs.experiment(
    name="fig1-incoming",
    shows="2510.15731, Figure 1",
    title="incoming attention of every token over the denoising steps",
    metric="received attention on both scales; share of patterns whose largest sink moved over the run",
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
