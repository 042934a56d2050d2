"""Figure 7: the position of each head's largest sink at every step, and the direction in which sinks drift."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import PromptRun, average, ratio, rounded, sink_rule
from dlm_lens.experiments.attention_sinks.two_scales import (
    NAMED,
    PLOTTED,
    SCALES,
    cost_of_every_order,
    drift_of_random_positions,
    followed,
    orders_of,
    runs_in_every_order,
    static_at_random_keys,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_below

NO_DIRECTION = 0.5
"""Bound of "the sink shifts right" and "from right to left": by chance half of the drifting patterns go right."""

CHANCE = {"right": (0.0, 1.0), "drift": None}
"""What a sink at a random written position would show, and its bounds: share of runs to the right, slope."""

MOSTLY = 0.5
"""Bound of "mostly static": more than half of the patterns with a sink."""

HEADS = 4
"""Paths in a panel of the figure."""

LEAST_STEPS = 0.5
"""A head is drawn if it has a sink in at least this share of the steps."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt, order of decoding and scale: sums of drift and direction over patterns, and what the order gives.

    Of the first prompt also the paths of a few heads.
    """
    found: dict[str, Any] = {}
    for order, prompt_runs in runs_in_every_order(item, settings, bench).items():
        for number, prompt_run in enumerate(prompt_runs):
            values = _orders(prompt_run, seed=item["start"] + number)
            paths = followed(prompt_run.received["all"], sink_rule(settings))
            for scale, one in paths.items():
                values |= {
                    f"{scale} {name}": value for name, value in _measured(one, item["start"] + number).items()
                }
            for name, value in values.items():
                found.setdefault(f"{order}: {name}", []).append(rounded(value))
            if item["start"] == 0 and number == 0 and not item.get("network", 0):
                found[f"{order}: example"] = _example(prompt_run, paths)
    return found


def _measured(paths: Any, seed: int) -> dict[str, float]:
    """Sums over the patterns of one prompt."""
    measures, kinds = paths.measures, paths.kinds.flatten().tolist()
    return {
        "drift": float(measures["drift"].sum()),
        "drifting": int(measures["drift"].count()),
        "right": int(measures["drift_right"].sum()),
        "directed": int(measures["drift_right"].count()),
        "static": kinds.count("static"),
        "with sink": len(kinds) - kinds.count("none"),
        "static at random": static_at_random_keys(paths, seed),
    }


def _orders(prompt_run: PromptRun, seed: int) -> dict[str, float]:
    """Drift of a random written position of the current block, and of one of the whole canvas, prompt included."""
    run, row = prompt_run.run, prompt_run.row
    steps = int(run.row_steps[row])
    written = run.attention_mask[row].numpy() & ~run.masked[:steps, row].numpy()
    position = np.arange(written.shape[1])
    inside = np.stack([(start <= position) & (position < stop) for start, stop in run.spans[:steps]])
    both = {"block": written & inside, "any": written}
    return {
        f"{name} {measure}": value
        for name, open_to in both.items()
        for measure, value in drift_of_random_positions(open_to, seed).items()
    }


def _example(prompt_run: PromptRun, paths: Any) -> dict[str, Any]:
    """The paths of the heads whose largest sink varies most, positions counted from the prompt's first token."""
    run, row = prompt_run.run, prompt_run.row
    shift, spans = int(run.padding[row]), run.spans[: int(run.row_steps[row])]
    found: dict[str, Any] = {"spans": [[start - shift, stop - shift] for start, stop in spans]}
    for scale, one in paths.items():
        main = one.main[:, 0].flatten(1).numpy()
        place = np.where((main >= 0) & (main < one.canvas), main - shift, -1)
        heads = one.main.shape[-1]
        layers = one.layers or range(one.main.shape[-2])
        found[scale] = [
            {"layer": int(layers[at // heads]), "head": int(at % heads), "path": place[:, at].tolist()}
            for at in _most_variable(place)
        ]
    return found


def _most_variable(place: Any) -> list[int]:
    """Up to `HEADS` patterns with a sink in enough of the steps, by falling variance of the position."""
    there = place >= 0
    enough = there.mean(0) >= LEAST_STEPS
    spread = np.where(enough, np.ma.masked_array(place, ~there).var(0).filled(0), -1.0)
    order = np.argsort(-spread, kind="stable")[:HEADS]
    return [int(at) for at in order if enough[at]]


def render(results: Results) -> Rendering:
    """The paths of a few heads of each model, and the drift over all heads."""
    from dlm_lens.experiments.attention_sinks.charts import path_panels

    rows, panels, bands = [], {}, {}
    for model in results.models:
        for order in orders_of(results, model):
            rows += [_row(results, model, order, scale) for scale in SCALES]
            for record in results.where(model=model, start=0):
                example = record.value.get(f"{order}: example")
                for scale in SCALES if example and results.is_causal(model) else (PLOTTED,):
                    title = f"{model}, {order}" + (f", {SCALES[scale]}" if results.is_causal(model) else "")
                    if example and example[scale]:
                        panels[title] = {
                            f"layer {one['layer']}, head {one['head']}": [
                                p if p >= 0 else None for p in one["path"]
                            ]
                            for one in example[scale]
                        }
                        bands[title] = example["spans"] if order == "blocks" else []
    head = ["model", "order", "scale", "drift, positions per step", "to the right, of the patterns that drift",
            "n drifting", "static, of the patterns with a sink", "static at random keys", "n runs"]  # fmt: skip
    tables = [
        Table("path of the largest sink of every head; 95% intervals over prompts (and networks)", head, rows),
        Table("what the order of decoding gives: paths that jump to a random written position at every step",
              ["model", "order", "of the current block: to the right", "drift",
               "of the prompt and the answer: to the right", "drift"], list(_order_rows(results))),
    ]  # fmt: skip
    figures = {}
    if panels:
        figures["paths"] = path_panels(panels, bands=bands)
    return Rendering(tables, figures, list(_findings(results)), [
        "What to see: per model the heads of the first prompt whose largest sink varies most, of those with a sink "
        f"in at least {LEAST_STEPS:.0%} of the steps. A static sink is a horizontal line. Shaded: the block that "
        "is decoded.",
        "Without blocks (`block_length` is the length of the answer) the sampler may write any open position, as "
        "Dream's does.",
    ])  # fmt: skip


def _row(results: Results, model: str, order: str, scale: str) -> list[str]:
    name = f"{order}: {scale}"
    return [
        model, order, NAMED[scale], str(drift(results, model, order, scale)),
        str(to_the_right(results, model, order, scale)), str(sum(results.listed(f"{name} directed", model=model))),
        str(static_share(results, model, order, scale)), str(static_by_chance(results, model, order, scale)),
        str(len(results.listed(f"{name} drift", model=model))),
    ]  # fmt: skip


def _order_rows(results: Results) -> Iterator[list[str]]:
    for model in results.models:
        for order in orders_of(results, model):
            yield [model, order, *(str(average(results, model, f"{order}: {kind} {measure}", bounds=bounds))
                                   for kind in ("block", "any") for measure, bounds in CHANCE.items())]  # fmt: skip


def drift(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """Mean slope of the largest sink's position over steps, over the patterns that have a sink."""
    return ratio(results, model, f"{order}: {scale} drift", f"{order}: {scale} drifting", bounds=None)


def to_the_right(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """Of the patterns that drift, the share that drift to the right."""
    name = f"{order}: {scale}"
    return ratio(results, model, f"{name} right", f"{name} directed", bounds=(0, 1))


def static_share(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """Of the patterns with a sink, the share that are static."""
    name = f"{order}: {scale}"
    return ratio(results, model, f"{name} static", f"{name} with sink", bounds=(0, 1))


def static_by_chance(results: Results, model: str, order: str, scale: str = PLOTTED) -> Interval:
    """The same share if every step had as many sinks at random keys."""
    name = f"{order}: {scale}"
    return ratio(results, model, f"{name} static at random", f"{name} with sink", bounds=(0, 1))


def _findings(results: Results) -> Iterator[Finding]:
    # In an AR model all new keys appear on the right.
    for model in results.diffusion_models:
        for order in orders_of(results, model):
            right, static = to_the_right(results, model, order), static_share(results, model, order)
            near, anywhere = (
                average(results, model, f"{order}: {kind} right", bounds=CHANCE["right"])
                for kind in ("block", "any")
            )
            null = (
                f"half; a random written position of the {'block' if order == 'blocks' else 'answer'}: {near}; "
                f"of the prompt and the answer: {anywhere}"
            )
            here = f"{model}, {order}: {right} of the drifting patterns go right"
            if order == "blocks":
                yield Finding.of(
                    "LLaDA: the sink shifts right as more blocks are denoised",
                    here,
                    is_above(right, NO_DIRECTION),
                    why="more than half; the order of the blocks, from left to right, gives this direction to any "
                    "sink that is at some written position",
                    null=null,
                )
            else:
                yield Finding.of(
                    "Dream: the sink moves from right to left",
                    here,
                    is_below(right, NO_DIRECTION),
                    why="less than half, decoded without blocks as Dream is",
                    null=null,
                )
            yield Finding.of(
                "MMaDA: mostly static",
                f"{model}, {order}: {static} of the patterns with a sink are static",
                is_above(static, MOSTLY),
                why="more than half",
                null=f"as many sinks at random keys: {static_by_chance(results, model, order)}",
            )


EXPERIMENT = recorded_runs.experiment(
    name="fig7-paths",
    shows="2510.15731, Figure 7",
    title="position of the largest sink over the steps",
    metric="canvas position of the largest sink; slope of position over step; with and without blocks",
    run=run,
    render=render,
    cost=cost_of_every_order,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
