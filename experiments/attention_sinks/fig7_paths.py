"""Figure 7: where the largest sink of a head is at every step, and in which direction sinks drift."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import watching
from dlm_lens.experiments.attention_sinks.models import is_causal
from dlm_lens.experiments.attention_sinks.watching import numbers, rule, watch
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: sums of drift and direction over patterns; of the first prompt every head's path."""
    import dlm_lens as dl

    found: dict[str, Any] = {name: [] for name in ("drift", "drifting", "right", "directed", "static", "with_sink")}
    for number, watched in enumerate(watch(item, settings, bench)):
        paths = dl.trajectories(watched.received["all"], rule(settings))
        measures = paths.measures
        found["drift"].append(numbers(float(measures["drift"].sum())))
        found["drifting"].append(int(measures["drift"].count()))
        found["right"].append(int(measures["drift_right"].sum()))
        found["directed"].append(int(measures["drift_right"].count()))
        kinds = paths.kinds.flatten().tolist()
        found["static"].append(kinds.count("static"))
        found["with_sink"].append(len(kinds) - kinds.count("none"))
        if item["start"] == 0 and number == 0:
            shift = int((~watched.run.attention_mask[watched.row]).sum())
            main = paths.main[:, 0]
            inside = (main >= 0) & (main < paths.canvas)
            found["paths"] = numbers((main - shift).masked_fill(~inside, -1))
            found["spans"] = [[start - shift, stop - shift] for start, stop in watched.run.spans]
    return found


def render(results: Results) -> Rendering:
    """The path that varies most in each model, and the drift over all heads."""
    from dlm_lens.experiments.attention_sinks.drawing import lines

    rows, curves = [], {}
    for model in results.models:
        rows.append([
            model, f"{drift(results, model)}", str(to_the_right(results, model)),
            str(sum(results.listed("directed", model=model))), str(steady(results, model)),
            str(len(results.listed("drift", model=model))),
        ])  # fmt: skip
        for record in results.where(model=model, start=0):
            layer, number, path = _liveliest(np.asarray(record.value["paths"]))
            curves[f"{model}, layer {layer}, head {number}"] = [(t, p) for t, p in enumerate(path) if p >= 0]
    head = ["model", "drift, positions per step", "to the right, of the patterns that drift", "n drifting",
            "static, of the patterns with a sink", "n prompts"]  # fmt: skip
    table = Table("path of the largest sink of every head; 95% intervals over prompts", head, rows)
    figure = lines(curves, x="step", y="position of the largest sink (prompt starts at 0)",
                   title="per model the head whose largest sink varies most; first prompt")  # fmt: skip
    return Rendering([table], {"paths": figure}, list(_findings(results)))


def drift(results: Results, model: str) -> Interval:
    """Mean slope of position over step of the largest sink, over the patterns that have one."""
    return ratio_over_prompts(results.listed("drift", model=model), results.listed("drifting", model=model))


def to_the_right(results: Results, model: str) -> Interval:
    """Part of the patterns with a drift that go right."""
    return ratio_over_prompts(results.listed("right", model=model), results.listed("directed", model=model))


def steady(results: Results, model: str) -> Interval:
    """Part of the patterns with a sink that are static."""
    return ratio_over_prompts(results.listed("static", model=model), results.listed("with_sink", model=model))


def _liveliest(paths: Any) -> tuple[int, int, list[int]]:
    """Layer, head and path of the head that has a sink at most steps and whose largest sink varies most."""
    there = paths >= 0
    spread = np.where(there.sum(0) > 1, np.ma.masked_array(paths, ~there).std(0).filled(0), -1)
    spread = np.where(there.mean(0) >= 0.9 * there.mean(0).max(), spread, -1)
    layer, head = np.unravel_index(int(spread.argmax()), spread.shape)
    return int(layer), int(head), paths[:, layer, head].tolist()


def _findings(results: Results) -> Iterator[Finding]:
    # A baseline's new keys all appear on the right.
    for model in (model for model in results.models if not is_causal(results, model)):
        right, static = to_the_right(results, model), steady(results, model)
        yield Finding(
            "LLaDA: the sink shifts right as blocks are denoised",
            f"{model}: {right} of the drifting patterns go right",
            "agrees" if right.low > 0.5 else "disagrees" if right.high < 0.5 else "undecided",
            "blocks of 8 from left to right here, of 32 in the paper",
        )
        yield Finding(
            "MMaDA: mostly static",
            f"{model}: {static} of the patterns with a sink are static",
            "agrees" if static.low > 0.5 else "disagrees" if static.high < 0.5 else "undecided",
            "agreement is taken as more than half",
        )
    yield Finding("Dream: from right to left", "these models are decoded in blocks, Dream is not", "no counterpart",
                  "run with --models Dream-org/Dream-v0-Instruct-7B")  # fmt: skip


EXPERIMENT = Experiment(
    name="fig7-paths",
    shows="2510.15731, Figure 7",
    title="position of the largest sink over the steps",
    metric="canvas position of the largest sink; slope of position over step",
    small=watching.SMALL,
    full=watching.FULL,
    items=watching.items,
    run=run,
    render=render,
    cost=watching.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
