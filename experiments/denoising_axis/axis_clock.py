"""2607.01774: denoising time read from the residual stream, and what shifting it does to the predictions.

Every number has its control: permuted labels, what the token or the position alone says, a twin with permuted
weights, and shifts of the same length in other directions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.problems import chat, problems
from dlm_lens.experiments.attention_sinks.recorded_runs import rounded
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts, signed
from dlm_lens.experiments.results import Item, Record, Results, Settings
from dlm_lens.experiments.verdicts import all_of, is_above, is_below, is_within
from dlm_lens.statistics import POSITIVE_BOUNDS

SMALL: dict[str, Any] = {
    "models": ["toy", "toy-sink", "toy-ar"], "task": "toy_arithmetic", "prompts": 96, "batch": 48,
    "sampler": {"steps": 16, "gen_length": 16}, "fewer_steps": 8, "longer": 24, "layers": None,
    "by": [-0.5, 0.5], "controls": 3, "chat": False,
}  # fmt: skip

FULL: dict[str, Any] = {
    **SMALL,
    "models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"],
    "task": "english_prompts", "prompts": 32, "batch": 4, "sampler": {"steps": 64, "gen_length": 64},
    "fewer_steps": 32, "longer": 96, "layers": [4, 12, 20, 28], "chat": True,
}  # fmt: skip

WEIGHTS = ("trained", "untrained")
LEAST = 0.5
"""R^2 that the paper reports as the least of all layers, by descriptions of others; the bound of the first rule."""

MARGIN = 0.05
"""R^2 within this of 0 is none."""


def items(settings: Settings) -> Iterator[Item]:
    """Each model with its weights and with permuted ones; the runs are the trained model's in both."""
    for model in settings["models"]:
        for weights in WEIGHTS:
            yield {"model": model, "weights": weights}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Fit the clock on half of the prompts; everything is measured on the other half."""
    from dlm_lens.probes import denoising_clock, read_clock, untrained_twin
    from dlm_lens.probes.clock.fitting import split_by_prompt

    model = bench.model(item["model"])
    these = problems(settings["task"])[: settings["prompts"]]
    runs = _runs(model, chat(model, these, settings), settings, {})
    read = untrained_twin(model) if item["weights"] == "untrained" else model
    clock = denoising_clock(read, runs, layers=settings["layers"])
    found: dict[str, Any] = {"reading": _reading(clock)}
    if item["weights"] == "untrained":
        return found
    _, test, _ = split_by_prompt(runs, 0.5, 0, "axis-clock")
    scored = [
        problem for problem, out in zip(these, [one for part in test for one in part.tolist()], strict=True) if out
    ]
    held_out = chat(model, scored, settings)
    found["geometry"] = {
        name: rounded(clock.geometry(name).to_numpy(), 4) for name in clock.classes if _has(clock, name)
    }
    if not runs[0].autoregressive:
        others = {"fewer steps": {"steps": settings["fewer_steps"]},
                  "longer answer": {"steps": settings["longer"], "gen_length": settings["longer"]}}  # fmt: skip
        best = clock.best_layer("open")
        found["layer"] = best
        for name, change in others.items():
            reading = read_clock(model, _runs(model, held_out, settings, change), clock)
            found[name] = _follows(reading, best)
        found["steering"] = _steering(model, _runs(model, held_out, settings, {}), clock, settings)
    return found


def _runs(model: Any, texts: Sequence[Any], settings: Settings, change: Mapping[str, Any]) -> list[Any]:
    import dlm_lens as dl

    size = settings["batch"]
    given = {**settings["sampler"], **change}
    return [dl.denoise(model, texts[i : i + size], **given) for i in range(0, len(texts), size)]


def _has(clock: Any, name: str) -> bool:
    return bool(clock.reading.count[clock.reading.kind_index(name)].any())


def _reading(clock: Any) -> dict[str, Any]:
    """Per class of positions and layer: squared errors of every held-out prompt, and those of the baselines."""
    reading = clock.reading
    found: dict[str, Any] = {"layers": list(reading.layers)}
    for name in reading.classes:
        if not _has(clock, name):
            continue
        count = reading.count[reading.kind_index(name)].sum(0)
        best = reading.best_layer(name)
        found[name] = {
            "count": rounded(count, 0),
            "spread": rounded(reading.spread(name), 5),
            "errors": [rounded(reading.errors(name, layer), 5) for layer in reading.layers],
            "absolute": [
                rounded(reading.absolute[reading.kind_index(name), place].sum(0) * reading.steps, 4)
                for place in range(len(reading.layers))
            ],
            "null": [rounded(max(reading.null(name, layer)), 4) for layer in reading.layers],
            "token": rounded(reading.baseline_errors(name, "token"), 5),
            "position": rounded(reading.baseline_errors(name, "position"), 5),
            "by_label": rounded(reading.by_label(name, best).to_numpy(), 4),
        }
    return found


def _follows(reading: Any, layer: int) -> dict[str, Any]:
    """Per quantity and prompt the mean squared distance of the reading at open positions from it."""
    from dlm_lens.probes.clock.states import QUANTITIES

    found = {}
    for quantity in QUANTITIES:
        sums = reading.distances("open", layer, quantity)
        found[quantity] = rounded(sums[:, 0] / sums[:, 1].clamp(min=1), 6)
    return found


def _steering(model: Any, runs: Sequence[Any], clock: Any, settings: Settings) -> list[dict[str, Any]]:
    """Per shift and direction the mean change of every prompt, controls averaged."""
    from dlm_lens.probes import clock_steering
    from dlm_lens.probes.clock.shifts import MEASURES

    parts = [
        clock_steering(
            model,
            one,
            clock,
            by=settings["by"],
            layer=max(0, clock.best_layer("open")),
            controls=settings["controls"],
        )
        for one in runs
    ]
    found = []
    for by in settings["by"]:
        for direction in ("clock", "random", "orthogonal"):
            line: dict[str, Any] = {"by": by, "direction": direction}
            for measure in MEASURES:
                pairs = [part.row_sums(by, measure, direction) for part in parts]
                line[measure] = [one for total, count in pairs for one in rounded(total / count, 6)]
            found.append(line)
    return found


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A run and two passes over its canvases; with the model's own weights also other runs and shifts."""
    steps = int(settings["sampler"].get("steps", 32))
    passes = 3 * steps
    if item["weights"] == "trained":
        variants = len(settings["by"]) * (1 + 2 * settings["controls"])
        passes += (2 * settings["fewer_steps"] + 2 * settings["longer"] + steps * (variants + 2)) // 2
    rows = min(settings["batch"], settings["prompts"])
    batches = -(-settings["prompts"] // rows)
    answer = int(settings["sampler"].get("gen_length", 32))
    return [Cost(passes * batches, rows, answer + (128 if settings["chat"] else 32), item["model"])]


def r2(record: Record, name: str, place: int) -> Interval:
    """R^2 on the held-out prompts; the mean label is that of all of them."""
    one = record.value["reading"][name]
    return _complement(ratio_over_prompts(one["errors"][place], one["spread"], bounds=POSITIVE_BOUNDS))


def beyond(record: Record, name: str, baseline: str) -> Interval:
    """The share of a baseline's squared error that the states remove, all layers but the embedding together."""
    one = record.value["reading"][name]
    errors = [sum(values) for values in zip(*one["errors"][1:], strict=True)]
    wanted = [value * (len(one["errors"]) - 1) for value in one[baseline]]
    return _complement(ratio_over_prompts(errors, wanted, bounds=POSITIVE_BOUNDS))


def gain_of_training(trained: Record, other: Record, name: str) -> Interval:
    """R^2 of the trained weights minus that of permuted ones, mean over the layers after the embedding."""
    one, two = (record.value["reading"][name] for record in (trained, other))
    layers = len(one["errors"]) - 1
    gain = [
        (sum(b) - sum(a)) / layers
        for a, b in zip(zip(*one["errors"][1:], strict=True), zip(*two["errors"][1:], strict=True), strict=True)
    ]
    return ratio_over_prompts(gain, one["spread"], bounds=None)


def _complement(found: Interval) -> Interval:
    return found._replace(value=1 - found.value, low=1 - found.high, high=1 - found.low)


def nearer(record: Record, run: str, quantity: str, than: str) -> Interval:
    """Mean squared distance of the reading from `than` minus that from `quantity`."""
    one, two = (record.value[run][name] for name in (quantity, than))
    return mean_over_prompts([b - a for a, b in zip(one, two, strict=True)], bounds=None)


def change(record: Record, by: float, measure: str, direction: str = "clock") -> Interval:
    """Mean change of a measure over the held-out prompts."""
    return mean_over_prompts(_line(record, by, direction)[measure], bounds=None)


def beyond_control(record: Record, by: float, measure: str, direction: str) -> Interval:
    """Mean change along the clock minus that along the controls."""
    one, two = (_line(record, by, each)[measure] for each in ("clock", direction))
    return mean_over_prompts([a - b for a, b in zip(one, two, strict=True)], bounds=None)


def _line(record: Record, by: float, direction: str) -> Mapping[str, Any]:
    return next(one for one in record.value["steering"] if (one["by"], one["direction"]) == (by, direction))


def render(results: Results) -> Rendering:
    """R^2 per layer beside its nulls, what the reading follows in other runs, and the effects of shifts."""
    tables = [_r2_table(results), _follows_table(results), _geometry_table(results), _steering_table(results)]
    captions = {
        "layers": "R^2 of time on held-out prompts by layer (-1: token embeddings), of the trained network and of "
        "one with permuted weights.",
        "steering": "Change of the entropy of predictions under shifts of the clock at open positions, and under "
        "shifts of the same length in other directions.",
    }
    figures = {"layers": _layers_figure(results), "steering": _steering_figure(results)}
    return Rendering(tables, figures, list(findings(results)), captions=captions)


def _pairs(results: Results) -> Iterator[tuple[str, Record, Record]]:
    for model in results.models:
        both = [results.where(model=model, weights=weights) for weights in WEIGHTS]
        if all(both):
            yield model, both[0][0], both[1][0]


def _r2_table(results: Results) -> Table:
    rows = []
    for model, trained, other in _pairs(results):
        for name, one in _classes(trained):
            known = {
                key: _complement(ratio_over_prompts(one[key], one["spread"], bounds=POSITIVE_BOUNDS))
                for key in ("token", "position")
            }
            for place, layer in enumerate(trained.value["reading"]["layers"]):
                off = ratio_over_prompts(one["absolute"][place], one["count"], bounds=POSITIVE_BOUNDS)
                rows.append([
                    model, name, str(layer), str(r2(trained, name, place)), str(off), f"{one['null'][place]:.2f}",
                    *(str(known[key]) for key in ("token", "position")), str(r2(other, name, place)),
                ])  # fmt: skip
    head = ["model", "positions", "layer", "R^2", "steps off", "permuted labels", "token alone", "position alone",
            "permuted weights"]  # fmt: skip
    return Table(
        "Time t/T on held-out prompts, intervals over prompts; permuted labels: the largest of 8", head, rows
    )


def _classes(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in ("open", "written", "prompt"):
        if name in record.value["reading"]:
            yield name, record.value["reading"][name]


def _follows_table(results: Results) -> Table:
    rows = []
    for model, trained, _ in _pairs(results):
        for name in ("fewer steps", "longer answer"):
            for quantity, values in trained.value.get(name, {}).items():
                off = mean_over_prompts(values, bounds=POSITIVE_BOUNDS)
                value, low, high = (max(0.0, one) ** 0.5 for one in (off.value, off.low, off.high))
                root = off._replace(value=value, low=low, high=high)
                rows.append([model, str(trained.value["layer"]), name, quantity, str(root)])
    return Table(
        "Root mean square distance of the mean reading at open positions from what a quantity would make it",
        ["model", "layer", "run", "quantity", "off"],
        rows,
    )


def _geometry_table(results: Results) -> Table:
    rows = []
    for model, trained, _ in _pairs(results):
        for name, lines in trained.value.get("geometry", {}).items():
            # Token embeddings of open positions do not move, nor do an AR model's states of its prompt.
            moving = [line for line in lines if line[0] >= 0 and line[1] is not None]
            rows += [[model, name, f"{a:.0f}", f"{b:.2f}", f"{c:.2f}", f"{d:.0f}"] for a, b, c, d in moving]
    head = ["model", "positions", "layer", "share of the first component", "dimension", "components for 90%"]
    return Table("The curve of mean states of the steps; dimension: participation ratio", head, rows)


def _steering_table(results: Results) -> Table:
    rows = []
    for model, trained, _ in _pairs(results):
        for one in trained.value.get("steering", []):
            cells = [
                signed(change(trained, one["by"], name, one["direction"]), 4)
                for name in ("confidence", "entropy", "kl", "flipped", "read")
            ]
            rows.append([model, str(trained.value["layer"]), f"{one['by']:+g}", one["direction"], *cells])
    head = ["model", "layer", "by", "direction", "confidence", "entropy, nats", "KL, nats", "flipped",
            "read in the last layer"]  # fmt: skip
    return Table("Changes under shifts of one layer's output at open positions", head, rows)


def _layers_figure(results: Results) -> Any:
    from dlm_lens.experiments.attention_sinks.charts import line_panels

    panels = {}
    for model, trained, other in _pairs(results):
        for name, _ in _classes(trained):
            layers = trained.value["reading"]["layers"]
            panels[f"{model}, {name} positions"] = {
                "trained": [(layer, r2(trained, name, place)) for place, layer in enumerate(layers)],
                "permuted weights": [(layer, r2(other, name, place)) for place, layer in enumerate(layers)],
                "permuted labels": list(zip(layers, trained.value["reading"][name]["null"], strict=True)),
            }
    return line_panels(panels, x="layer", y="R^2 of t/T", columns=3)


def _steering_figure(results: Results) -> Any:
    from dlm_lens.experiments.attention_sinks.charts import line_panels

    panels = {}
    for model, trained, _ in _pairs(results):
        lines = trained.value.get("steering", [])
        if lines:
            amounts = sorted({one["by"] for one in lines})
            panels[f"{model}, layer {trained.value['layer']}"] = {
                direction: [(by, change(trained, by, "entropy", direction)) for by in amounts]
                for direction in ("clock", "random", "orthogonal")
            }
    return line_panels(panels, x="shift of t/T", y="change of entropy, nats")


def findings(results: Results) -> Iterator[Finding]:
    """What the paper's abstract says, and what the controls leave of it; the rules were set before the numbers."""
    for model, trained, other in _pairs(results):
        layers = range(1, len(trained.value["reading"]["layers"]))
        for name, one in _classes(trained):
            found = [r2(trained, name, place) for place in layers]
            shown = ", ".join(map(str, found))
            if results.is_causal(model):
                yield from _causal_findings(model, name, trained, found)
                continue
            yield Finding.of(
                f"denoising progress is decodable across layers (of others' reports: R^2 above {LEAST} in all), "
                f"{name} positions",
                f"{model}: R^2 by layer {shown}",
                all_of(*(is_above(each, LEAST) for each in found)),
                why=f"agreement: above {LEAST} in every layer",
                null=f"permuted labels: at most {max(one['null']):.3f}",
            )
            gain = gain_of_training(trained, other, name)
            yield Finding.of(
                f"the model has learned to encode it, {name} positions",
                f"{model}: R^2 is {signed(gain, 4)} larger than with permuted weights, mean over layers",
                is_above(gain, 0),
                why="agreement: above 0; attention that averages over keys shows the share of masks untrained",
                null="0; the twin with permuted weights",
            )
        if not results.is_causal(model):
            more = [beyond(trained, "written", name) for name in ("token", "position")]
            yield Finding.of(
                "the time at decided positions is not that of their token or position",
                f"{model}: the states remove {more[0]} of the token's error, {more[1]} of the position's",
                all_of(*(is_above(each, 0) for each in more)),
                why="agreement: both above 0",
                null="0: the mean time at an equal token or position",
            )
            yield from _other_runs(model, trained)
            yield from _steering_findings(model, trained)


def _causal_findings(model: str, name: str, trained: Record, found: Sequence[Interval]) -> Iterator[Finding]:
    if name == "prompt":
        yield Finding.of(
            "(control) the prompt of an AR model does not change while it writes",
            f"{model}: R^2 at prompt positions by layer {', '.join(map(str, found))}",
            all_of(*(is_within(each, -MARGIN, MARGIN) for each in found)),
            why=f"agreement: within {MARGIN} of 0 in every layer; else the measurement has a defect",
            null="0",
        )
    if name == "written":
        more = beyond(trained, name, "position")
        yield Finding.of(
            "(control) a written position of an AR model knows its place and no more",
            f"{model}: the states remove {more} of the error of the position alone, all layers",
            is_below(more, MARGIN),
            why=f"agreement: below {MARGIN}",
            null="0",
        )


def _other_runs(model: str, trained: Record) -> Iterator[Finding]:
    step = nearer(trained, "fewer steps", "progress", "step")
    yield Finding.of(
        "what is read is progress, not the number of the step",
        f"{model}: with half as many steps the squared distance from the step number is {signed(step, 4)} larger "
        "than from progress",
        is_above(step, 0),
        why="agreement: above 0",
        null="0: no difference",
    )
    count = nearer(trained, "longer answer", "progress", "open positions")
    share = nearer(trained, "longer answer", "progress", "open share of the canvas")
    yield Finding.of(
        "what is read is progress, not a count of masks",
        f"{model}: with a longer answer the squared distance from the count of open positions is "
        f"{signed(count, 4)} larger than from progress, from their share of the canvas {signed(share, 4)}",
        all_of(is_above(count, 0), is_above(share, 0)),
        why="agreement: both above 0",
        null="0: no difference",
    )


def _steering_findings(model: str, trained: Record) -> Iterator[Finding]:
    amounts = sorted({one["by"] for one in trained.value["steering"]})
    back, on = amounts[0], amounts[-1]
    lower, higher = change(trained, on, "entropy"), change(trained, back, "entropy")
    yield Finding.of(
        "steering the time changes confidence and entropy predictably: later is surer",
        f"{model}: the entropy changes by {signed(lower, 4)} nats for {on:+g}, {signed(higher, 4)} for {back:+g}",
        all_of(is_below(lower, 0), is_above(higher, 0)),
        why="agreement: entropy falls when time is moved on and rises when it is moved back",
        null=f"as long, orthogonal to time: {signed(change(trained, on, 'entropy', 'orthogonal'), 4)}, "
        f"{signed(change(trained, back, 'entropy', 'orthogonal'), 4)}",
    )
    more = [beyond_control(trained, by, "kl", "orthogonal") for by in (back, on)]
    yield Finding.of(
        "the direction of time matters more to the predictions than others",
        f"{model}: KL is {signed(more[1], 4)} nats larger than for as long shifts orthogonal to time for {on:+g}, "
        f"{signed(more[0], 4)} for {back:+g}",
        all_of(*(is_above(each, 0) for each in more)),
        why="agreement: above 0 in both directions",
        null="0: directions of the states' own variation, orthogonal to the probe and to three components of time",
    )


EXPERIMENT = Experiment(
    name="axis-clock",
    shows="2607.01774",
    title="denoising time in the residual stream, its nulls, and what shifting it does",
    metric="R^2 of a linear probe of t/T on held-out prompts, and changes of predictions on stored canvases",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=cost,
    own={
        "smollm2": {
            "task": "english_prompts",
            "chat": True,
            "sampler": {"gen_length": 16},
            "batch": 8,
            "prompts": 32,
        }
    },
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
