"""Figure 6: (a) different sinks for masked and unmasked queries; (b) transient sinks."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    head_pattern,
    per_network,
    per_prompt,
    ratio,
    record_prompts,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_within

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dlm_lens.sinks.analysis.query_splits import SplitBy

MASKED, WRITTEN = "#d55e00", "#0072b2"

NOTE = (
    "(a) is the first prompt's case (step, layer, head) with the clearest separate sinks: both "
    "classes of queries have a sink, the sinks differ, and the smaller of two contrasts is largest, that of each "
    "class's sink between the class's own score and the other class's. (b) is the transient sink, seen to appear "
    "and to end, with the highest score, of the first prompt that has one."
)


def clearest(masked: Any, unmasked: Any, rule: Any) -> tuple[int, int, int, int, int] | None:
    """Step, layer, head, and both classes' main sinks (keys of the canvas) of the case with the largest contrast.

    With the scores s_m and s_u of the classes and their main sinks j_m != j_u, the contrast is
    min(s_m[j_m] - s_u[j_m], s_u[j_u] - s_m[j_u]).
    """
    import torch

    from dlm_lens.sinks import find_sinks

    one, other = (find_sinks(given, rule).main()[:, 0] for given in (masked, unmasked))
    first, second = (given.values[:, 0].float() for given in (masked, unmasked))

    def gain(own: Any, others: Any, place: Any) -> Any:
        return (own - others).gather(-1, place.clamp(min=0)[..., None])[..., 0]

    contrast = torch.minimum(gain(first, second, one), gain(second, first, other))
    canvas = masked.values.shape[-1] - masked.sinks
    apart = (one >= 0) & (other >= 0) & (one != other) & (one < canvas) & (other < canvas)
    contrast = contrast.masked_fill(~apart, -torch.inf).nan_to_num(nan=-torch.inf)
    if not bool(apart.any()):
        return None
    step, layer, head = (int(place) for place in np.unravel_index(int(contrast.argmax()), contrast.shape))
    return step, masked.layers[layer], head, int(one[step, layer, head]), int(other[step, layer, head])


def separate_example(model: Any, prompt_run: Any, rule: Any) -> dict[str, Any] | None:
    """The map of the prompt's clearest separate sinks; None where no case has any."""
    found = clearest(prompt_run.received["masked"], prompt_run.received["unmasked"], rule)
    if found is None:
        return None
    step, layer, head, *sinks = found
    shift = int(prompt_run.run.padding[prompt_run.row])
    places = [place - shift for place in sinks]
    return {
        "layer": layer, "head": head, "steps": [step], "sinks": places,
        "tokens": [_token(prompt_run, step, place) for place in places],
        **_maps(model, prompt_run, [step], layer, head),
    }  # fmt: skip


def transient_example(model: Any, prompt_run: Any, rule: Any) -> dict[str, Any] | None:
    """The maps of the prompt's highest transient sink before, in and after its life; None where there is none."""
    import dlm_lens as dl

    lives = dl.trajectories(prompt_run.received["all"], rule).table()
    lives = lives[lives["transient"] & lives["died"] & lives["born"] & lives["position"].notna()]
    if lives.empty:
        return None
    line = lives.sort_values("peak", kind="stable").iloc[-1]
    layer, head, first, last = (int(line[name]) for name in ("layer", "head", "first_step", "last_step"))
    steps = [first - 1, first, last + 1]
    return {
        "layer": layer, "head": head, "steps": steps, "sinks": [int(line["position"])],
        "tokens": [_token(prompt_run, first, int(line["position"]))],
        **_maps(model, prompt_run, steps, layer, head),
    }  # fmt: skip


def _maps(model: Any, prompt_run: Any, steps: list[int], layer: int, head: int) -> dict[str, Any]:
    run, row = prompt_run.run, prompt_run.row
    content = run.attention_mask[row].bool()
    patterns = (head_pattern(model, run, step=step, row=row, layer=layer, head=head) for step in steps)
    return {
        # Without the columns of learned sink tokens.
        "maps": [rounded(pattern[:, : len(pattern)], 2) for pattern in patterns],
        "masked": [[int(flag) for flag in run.masked[step, row][content]] for step in steps],
    }


def _token(prompt_run: Any, step: int, place: int) -> str:
    run = prompt_run.run
    shift = int(run.padding[prompt_run.row])
    return str(run.tokenizer.decode([int(run.canvases[step, prompt_run.row, place + shift])]))


def example_maps(results: Results) -> "dict[str, Figure]":
    """One figure of each kind, with a row of maps per model; none where no model has an example."""
    found: dict[str, Figure] = {}
    for kind, count in (("separate", 1), ("transient", 3)):
        shown = {
            model: example
            for model in results.models
            for record in results.where(model=model)
            if (example := (record.value.get("examples") or {}).get(kind))
        }
        if shown:
            found[kind] = _figure(shown, count)
    return found


def _figure(shown: dict[str, Any], count: int) -> "Figure":
    """Maps side by side; with one map per model the models are side by side, else one below the other."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows, columns = (1, len(shown)) if count == 1 else (len(shown), count)
    figure = Figure(figsize=(3.5 * columns + 0.4, 3.3 * rows + 0.5), layout="constrained")
    panels = [(model, one, place) for model, one in shown.items() for place in range(count)]
    for number, (model, one, place) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        title = f"{model}, layer {one['layer']}, head {one['head']}, step {one['steps'][place]}"
        _draw(axes, one, place, title)
    marks = [
        Line2D([], [], marker="s", linestyle="", color=MASKED, label="masked query"),
        Line2D([], [], marker="s", linestyle="", color=WRITTEN, label="unmasked query"),
    ]
    colours = (MASKED, WRITTEN) if count == 1 else ("black",)
    words = ("sink of masked queries", "sink of unmasked queries") if count == 1 else ("the transient sink",)
    marks += [
        Line2D([], [], marker="v", linestyle="", color=colour, label=word)
        for colour, word in zip(colours, words, strict=True)
    ]
    figure.legend(handles=marks, loc="outside lower left", ncols=4, fontsize=7, frameon=False)
    return figure


def _draw(axes: "Axes", one: dict[str, Any], place: int, title: str) -> None:
    pattern = np.asarray(one["maps"][place], float)
    size = len(pattern)
    mesh = axes.pcolormesh(pattern, cmap="viridis", vmin=0)
    masked = np.asarray(one["masked"][place], bool)
    for flags, colour in ((masked, MASKED), (~masked, WRITTEN)):
        at = np.flatnonzero(flags) + 0.5
        axes.plot(np.full(len(at), -1.0), at, marker="s", markersize=2.5, linestyle="", color=colour, clip_on=False)
    colours = (MASKED, WRITTEN) if len(one["sinks"]) == 2 else ("black",)
    for sink, colour in zip(one["sinks"], colours, strict=True):
        axes.plot([sink + 0.5], [-0.8], marker="v", markersize=6, color=colour, clip_on=False)
    axes.set_xlim(0, size)
    axes.set_ylim(size, 0)
    axes.tick_params(labelsize=6, pad=5)
    axes.set_xlabel("key", fontsize=7)
    axes.set_ylabel("query", fontsize=7)
    axes.set_title(title, loc="left", fontsize=7, pad=10, parse_math=False)
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("attention", fontsize=6)


SPLITS: "tuple[SplitBy, ...]" = ("random", "position")
COUNTS = ("both", "differ", *(f"{split}_{name}" for split in SPLITS for name in ("cases", "state", "null")))


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and layer: cases in which the classes' main sinks differ, beside splits that ignore the masks.

    A case is a step and head at which masked and written queries both have a sink. Of the cases in which a split's
    parts have one too ("cases"), "state" is how often the classes differ and "null" how often the parts do, a mean
    over the draws of each case. Lives are those of sinks that were seen to end, also with the steps shuffled.

    Of a model with sliding windows the layers without one are measured.

    Raises:
        ValueError: an AR model, or one with a sliding window in all its layers.
    """
    from dlm_lens.adapters import family_of
    from dlm_lens.attention import attention_blocks
    from dlm_lens.sinks import SplitAttention

    model = model_of(item, settings, bench)
    if family_of(model.config.model_type).causal:
        raise ValueError(
            f"{item['model']} is an AR model, in which no query is masked; Figure 6 compares masked queries with "
            "written ones: leave it out of the models"
        )

    names = ("lives", "transient", "shuffled_lives", "shuffled_transient")
    left_out = _layers_with_window(model, item["model"])
    found: dict[str, Any] = {name: [] for name in (*COUNTS, *names)} | {"left_out": left_out}
    layers = [layer for layer in range(len(attention_blocks(model))) if layer not in left_out]
    splits = [SplitAttention(settings["draws"]), SplitAttention(1, "position")]
    for number, prompt_run in enumerate(
        record_prompts(item, settings, bench, ("all", "masked", "unmasked"), splits, layers)
    ):
        for name, value in _separate(prompt_run, settings).items():
            found[name].append(value)
        received = prompt_run.received["all"]
        for prefix, given in (("", received), ("shuffled_", _shuffled(received))):
            lives, short = _lives(given, settings)
            found[f"{prefix}lives"].append(lives)
            found[f"{prefix}transient"].append(short)
        if item["start"] == 0 and not item.get("network", 0):
            shown = found.setdefault("examples", {})
            if number == 0:
                shown["separate"] = separate_example(model, prompt_run, sink_rule(settings))
            if not shown.get("transient"):
                shown["transient"] = transient_example(model, prompt_run, sink_rule(settings))
    return found


def _layers_with_window(model: Any, name: str) -> list[int]:
    """The layers in which each query sees other keys, so that parts of as many queries cannot be compared.

    Raises:
        ValueError: all of them.
    """
    from dlm_lens.attention.sliding_windows import layer_windows

    if "encoder" in getattr(model, "attention_stacks", {}):
        return []  # a decoder's window reaches from its canvas, which is seen whole, back into the encoder's text
    windows = layer_windows(model)
    found = [layer for layer, window in enumerate(windows) if window is not None]
    if len(found) == len(windows):
        raise ValueError(
            f"{name} has a sliding window in all of its layers, so that each query sees other keys; Figure 6 "
            "compares queries that see the same keys: leave it out of the models"
        )
    return found


def main_sinks_differ(first: Any, second: Any, rule: Any) -> tuple[Any, Any]:
    """[step, layer, head]: whether both classes of one prompt have a sink, and whether the largest ones differ."""
    from dlm_lens.sinks import find_sinks

    one, other = (find_sinks(given, rule).main()[:, 0] for given in (first, second))
    both = (one >= 0) & (other >= 0)
    return both, both & (one != other)


def _separate(prompt_run: Any, settings: Settings) -> dict[str, list[float]]:
    import torch

    from dlm_lens.sinks import received_of_split

    rule = sink_rule(settings)
    both, differ = main_sinks_differ(prompt_run.received["masked"], prompt_run.received["unmasked"], rule)
    found: dict[str, Any] = {"both": both, "differ": differ}
    row, steps = slice(prompt_run.row, prompt_run.row + 1), slice(len(both))
    for split in SPLITS:
        draws = []
        for draw in range(settings["draws"] if split == "random" else 1):
            first, second = received_of_split(prompt_run.recording, split, draw)
            one, other = (half.part(rows=row, steps=steps) for half in (first, second))
            draws.append(main_sinks_differ(one, other, rule))
        defined, apart = (torch.stack(values).double().sum(0) for values in zip(*draws, strict=True))
        cases = both & (defined > 0)
        found[f"{split}_cases"], found[f"{split}_state"] = cases, differ & cases
        found[f"{split}_null"] = (apart / defined.clamp(min=1)) * cases
    return {
        name: [round(float(value), 3) for value in counts.double().sum((0, 2))] for name, counts in found.items()
    }


def _lives(received: Any, settings: Settings) -> tuple[int, int]:
    """Lifetimes that were seen to end, and how many of them are transient."""
    import dlm_lens as dl

    lives = dl.trajectories(received, sink_rule(settings)).table()
    # A sink that lasts to the end of the run has no measured lifetime.
    whole = lives[lives["died"]]
    return len(whole), int(whole["transient"].sum())


def _shuffled(received: Any) -> Any:
    import torch

    from dlm_lens.shapes import taken

    order = torch.randperm(len(received.values), generator=torch.Generator().manual_seed(0))
    return replace(received, **taken(received, {"step": order}))


def render(results: Results) -> Rendering:
    """How often the main sinks differ per layer, by state and by the other splits; lives; maps of chosen heads."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves, styles, short = [], {}, {}, []
    for number, model in enumerate(results.models):
        layers = list(enumerate(_layers(results, model)))
        for line, (name, split) in enumerate((("by state", None), *((f"by {s}", s) for s in SPLITS))):
            points = [(layer, differing(results, model, place, split)) for place, layer in layers]
            name = {"by random": "at random"}.get(name, name)
            curves[f"{model}, split {name}"], styles[f"{model}, split {name}"] = points, (number, line)
        for place, layer in layers:
            cases = sum(sum(one[place] for one in part) for part in per_network(results, "both", model=model))
            rows.append([
                model, str(layer), str(differing(results, model, place)),
                *(str(differing(results, model, place, split)) for split in SPLITS),
                *(str(excess(results, model, place, split)) for split in SPLITS), f"{cases:.0f}",
            ])  # fmt: skip
        short.append([model, str(transient(results, model)), str(transient(results, model, "shuffled_")),
                      str(sum(results.listed("lives", model=model)))])  # fmt: skip
    tables = [
        Table("(a) how often the main sinks of two sets of queries differ, of the steps of heads where both have "
              "one: masked against written queries, random sets of the same sizes, and the last queries against "
              "the first; 95% intervals",
              ["model", "layer", "masked, written", "random sets", "last, first", "by state - at random",
               "by state - by position", "n steps of heads"], rows),
        Table("(b) lives of at most 2 steps, of those that were seen to end, and the same with the steps of each "
              "run in random order",
              ["model", "transient", "steps shuffled", "n lives"], short),
    ]  # fmt: skip
    figures = {"split": line_chart(
        curves, x="layer", y="main sinks of both sets differ", styles=styles,
        ticks=[str(layer) for layer in range(max(_layers(results, model)[-1] for model in results.models) + 1)],
    )}  # fmt: skip
    notes = [NOTE, *_notes(results)]
    return Rendering(tables, {**example_maps(results), **figures}, list(findings(results)), notes)


def _layers(results: Results, model: str) -> list[int]:
    first = results.where(model=model)[0].value
    left_out = first.get("left_out", ())  # not in results stored before models with sliding windows were measured
    return [layer for layer in range(len(first["both"][0]) + len(left_out)) if layer not in left_out]


def _notes(results: Results) -> list[str]:
    windows = {model: results.where(model=model)[0].value.get("left_out", ()) for model in results.models}
    return [
        f"{model} is measured without the layers {', '.join(map(str, left_out))}: they have a sliding window, in "
        "which each query sees other keys."
        for model, left_out in windows.items()
        if left_out
    ]


def differing(results: Results, model: str, layer: int, split: str | None = None) -> Interval:
    """Share of a layer's cases in which the main sinks differ: of the classes, or of a split's parts.

    `layer` is a place among the measured layers, here and in `excess`.
    """
    names = ["differ", "both"] if split is None else [f"{split}_null", f"{split}_cases"]
    return per_prompt(results, model, names, lambda top, bottom: (top[layer], bottom[layer]), bounds=(0, 1))


def excess(results: Results, model: str, layer: int, split: str = "random") -> Interval:
    """The share in which the classes differ minus that of a split's parts, paired by step, layer and head."""
    names = [f"{split}_{name}" for name in ("state", "null", "cases")]
    return per_prompt(results, model, names, lambda s, n, c: (s[layer] - n[layer], c[layer]), bounds=(-1, 1))


def deeper(results: Results, model: str) -> Interval:
    """Each prompt's excess over random splits in the last layer minus that in the first."""

    def terms(state: list[float], null: list[float], cases: list[float]) -> tuple[float, float]:
        if not cases[0] or not cases[-1]:
            return 0.0, 0.0
        last, first = ((state[layer] - null[layer]) / cases[layer] for layer in (-1, 0))
        return last - first, 1.0

    names = [f"random_{name}" for name in ("state", "null", "cases")]
    return per_prompt(results, model, names, terms, bounds=(-2, 2))


def transient(results: Results, model: str, prefix: str = "") -> Interval:
    """Share of the ended lifetimes of at most 2 steps."""
    return ratio(results, model, f"{prefix}transient", f"{prefix}lives", bounds=(0, 1))


def findings(results: Results) -> Iterator[Finding]:
    """Figure 6a against random splits of the same sizes, and Figure 6b."""
    for model in results.models:
        layers = _layers(results, model)
        first, last = layers[0], layers[-1]
        more, null = excess(results, model, -1), differing(results, model, -1, "random")
        yield Finding.of(
            "LLaDA, deepest layers: masked and unmasked tokens maintain separate sinks (6a)",
            f"{model}, layer {last}: they differ in {differing(results, model, -1)} of the cases, {more} more "
            "than random sets of queries",
            is_above(more, 0),
            why="agreement: more often than for random sets of the same sizes, paired by step and head",
            null=f"random sets: {null}; the last queries against the first: "
            f"{differing(results, model, -1, 'position')}",
        )
        yield Finding.of(
            '"the deepest layers showcase a particular type": separate sinks are a matter of depth (6a)',
            f"{model}: the excess over random sets is {deeper(results, model)} larger in layer {last} than in "
            f"{first}",
            is_above(deeper(results, model), 0),
            why="agreement: a larger excess in the last layer than in the first, paired by prompt",
            null="0: the same excess in both",
        )
        place = excess(results, model, -1, "position")
        yield Finding(
            "whether masks or places separate the sinks is not measured",
            f"{model}, layer {last}: the classes differ {place} more often than the last queries and the first do, "
            f"which differ in {differing(results, model, -1, 'position')}",
            "no counterpart",
            "masked queries are mostly the last ones; above 0: the state matters beyond the place",
        )
        short = transient(results, model)
        yield Finding.of(
            "LLaDA: sinks that appear for one step and vanish exist, as edge cases (6b)",
            f"{model}: {short} of the ended lives have at most 2 steps",
            is_within(short, 0, 0.5),
            why="agreement: some, and less than half",
            null=f"steps in random order: {transient(results, model, 'shuffled_')}",
        )


EXPERIMENT = recorded_runs.experiment(
    name="fig6-kinds",
    shows="2510.15731, Figure 6",
    title="sinks of masked against written queries, and transient sinks",
    metric="share of cases with different main sinks, beside random splits; share of lives of at most 2 steps",
    small={"models": ["toy", "toy-gated"], "draws": 8},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"], "draws": 8},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
