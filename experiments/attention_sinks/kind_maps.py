"""Attention maps of Figure 6: a head with separate sinks of masked and written queries, and a transient sink."""

from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_lens.experiments.attention_sinks.recorded_runs import head_pattern, rounded
from dlm_lens.experiments.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def separate(model: Any, prompt_run: Any, rule: Any) -> dict[str, Any] | None:
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


def transient(model: Any, prompt_run: Any, rule: Any) -> dict[str, Any] | None:
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


def figures(results: Results) -> "dict[str, Figure]":
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
