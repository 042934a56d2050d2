"""Figure 7: the position of each head's largest sink at every step, and the direction in which sinks drift."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded, sink_rule
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: sums of drift and direction over patterns; of the first prompt every head's path."""
    import dlm_lens as dl

    found: dict[str, Any] = {name: [] for name in ("drift", "drifting", "right", "directed", "static", "with_sink")}
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        paths = dl.trajectories(prompt_run.received["all"], sink_rule(settings))
        measures = paths.measures
        found["drift"].append(rounded(float(measures["drift"].sum())))
        found["drifting"].append(int(measures["drift"].count()))
        found["right"].append(int(measures["drift_right"].sum()))
        found["directed"].append(int(measures["drift_right"].count()))
        kinds = paths.kinds.flatten().tolist()
        found["static"].append(kinds.count("static"))
        found["with_sink"].append(len(kinds) - kinds.count("none"))
        if item["start"] == 0 and number == 0:
            shift = int((~prompt_run.run.attention_mask[prompt_run.row]).sum())
            main = paths.main[:, 0]
            inside = (main >= 0) & (main < paths.canvas)
            found["paths"] = rounded((main - shift).masked_fill(~inside, -1))
            found["spans"] = [[start - shift, stop - shift] for start, stop in prompt_run.run.spans]
    return found


def render(results: Results) -> Rendering:
    """The path with the largest variance in each model, and the drift over all heads."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves = [], {}
    for model in results.models:
        rows.append([
            model, f"{drift(results, model)}", str(to_the_right(results, model)),
            str(sum(results.listed("directed", model=model))), str(static_share(results, model)),
            str(len(results.listed("drift", model=model))),
        ])  # fmt: skip
        for record in results.where(model=model, start=0):
            layer, number, path = _most_variable(np.asarray(record.value["paths"]))
            curves[f"{model}, layer {layer}, head {number}"] = [(t, p) for t, p in enumerate(path) if p >= 0]
    head = ["model", "drift, positions per step", "to the right, of the patterns that drift", "n drifting",
            "static, of the patterns with a sink", "n prompts"]  # fmt: skip
    table = Table("path of the largest sink of every head; 95% intervals over prompts", head, rows)
    figure = line_chart(curves, x="step", y="position of the largest sink (prompt starts at 0)",
                   title="per model the head whose largest sink varies most; first prompt")  # fmt: skip
    return Rendering([table], {"paths": figure}, list(_findings(results)))


def drift(results: Results, model: str) -> Interval:
    """Mean slope of the largest sink's position over steps, over the patterns that have a sink."""
    return ratio_over_prompts(results.listed("drift", model=model), results.listed("drifting", model=model))


def to_the_right(results: Results, model: str) -> Interval:
    """Of the patterns that drift, the share that drift to the right."""
    return ratio_over_prompts(results.listed("right", model=model), results.listed("directed", model=model))


def static_share(results: Results, model: str) -> Interval:
    """Of the patterns with a sink, the share that are static."""
    return ratio_over_prompts(results.listed("static", model=model), results.listed("with_sink", model=model))


def _most_variable(paths: Any) -> tuple[int, int, list[int]]:
    """Layer, head and path of the head that has a sink at most steps and whose largest sink varies most."""
    there = paths >= 0
    spread = np.where(there.sum(0) > 1, np.ma.masked_array(paths, ~there).std(0).filled(0), -1)
    spread = np.where(there.mean(0) >= 0.9 * there.mean(0).max(), spread, -1)
    layer, head = np.unravel_index(int(spread.argmax()), spread.shape)
    return int(layer), int(head), paths[:, layer, head].tolist()


def _findings(results: Results) -> Iterator[Finding]:
    # In an AR model all new keys appear on the right.
    for model in results.diffusion_models:
        right, static = to_the_right(results, model), static_share(results, model)
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


EXPERIMENT = recorded_runs.experiment(
    name="fig7-paths",
    shows="2510.15731, Figure 7",
    title="position of the largest sink over the steps",
    metric="canvas position of the largest sink; slope of position over step",
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
