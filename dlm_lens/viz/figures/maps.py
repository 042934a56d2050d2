"""`attention_maps`: patterns at a few steps with the sinks marked (2510.15731, Figures 4, 6 and 8)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from dlm_lens.arguments import checked_arguments
from dlm_lens.attention import HookLike
from dlm_lens.printable import counted
from dlm_lens.recording import QueryClass
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sinks import AboveMean, Detector
from dlm_lens.sinks.detectors.base import as_detector
from dlm_lens.viz.attention_snapshot import Snapshot, rows_sum, snapshot
from dlm_lens.viz.figures.labels import (
    PLAIN,
    captioned,
    counted_keys,
    level_label,
    open_label,
    token_labels,
)
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, own_colours
from dlm_lens.viz.figures.positions import MASKED, SINK
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import index_of, listed_steps, row_number

INVISIBLE = "#d9d9d9"
MOST_MAPS = 4
MOST_LABELS = 40


@checked_arguments(steps=None)
@own_colours()
def attention_maps(
    model: Any,
    run: RunLike,
    *,
    steps: Sequence[int],
    layer: int,
    head: int | None,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    detector: Detector | str | None = None,
    queries: QueryClass = "all",
    title: str = "",
) -> Figure:
    """Attention A_ij of query i (down) on key j (across) at a few steps side by side, with the sinks marked.

    After Figures 4, 6 and 8 of 2510.15731 and Figure 1 of 2601.19657. A filled triangle marks the largest sink,
    hollow ones the other sinks by the rule; blue strips along the edges mark masked positions. Colours follow the
    square root of A_ij, so that weak attention is visible next to a sink, and all maps share one scale. After a
    white line follow the learned sink tokens. The model runs again on the canvas of each step.

    Args:
        model: the model of the run, as `dlm_lens.load` returned it.
        run: from `denoise`.
        steps: one to four steps of the run.
        layer: index of the layer.
        head: index of the head; None for the mean over heads.
        row: index of the sequence in the batch.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        detector: the rule of the marked sinks, on this map's scores; `AboveMean(3.0)`, Eq. 3, by default.
        queries: which queries count in these scores; the map shows all.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: no step or too many; a step, layer, head or row that the run does not have; an unknown class of
            queries.
    """
    run = as_run(run)
    chosen = listed_steps(steps)
    if not 1 <= len(chosen) <= MOST_MAPS:
        raise ValueError(f"{len(chosen)} steps; give one to {MOST_MAPS}")
    rule = AboveMean(3.0) if detector is None else as_detector(detector)
    place: dict[str, Any] = {"layer": layer, "row": row, "hooks": hooks, "queries": queries}
    shots = [snapshot(model, run, step=step, **place) for step in chosen]
    heads = shots[0].pattern.shape[0]
    maps = [_of_head(shot, head, heads) for shot in shots]
    width = 1.4 + 4.1 * len(shots)
    figure = NotebookFigure(figsize=(width, 5.3), layout="constrained")
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(values.max()) for values in maps))
    colours = colormaps["viridis"].with_extremes(bad=INVISIBLE)
    panels = figure.subplots(1, len(shots), squeeze=False)[0]
    found = []
    for axes, shot, values in zip(panels, shots, maps, strict=True):
        sinks = shot.sinks_of(rule, head)
        found.append(sinks)
        mesh = draw_cells(axes, _visible(shot, values), cmap=colours, norm=norm)
        _frame(axes, shot)
        _mark_masked(axes, shot)
        _mark_sinks(axes, shot, sinks)
        _name_tokens(axes, shot, sinks)
        axes.set_title(_panel_title(shot, sinks), fontsize=8, pad=3, **PLAIN)
    bar = figure.colorbar(mesh, ax=list(panels), pad=0.01, fraction=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(f"attention $A_{{ij}}$ ({rows_sum(*shots)}; square root scale)", fontsize=8)
    masked = any(bool(shot.masked.any()) for shot in shots)
    label = open_label(*(shot.uniform_noise for shot in shots)) if masked else None
    _explain(figure, masked=label, sinks=any(found), hidden=_hidden(shots))
    counts = dict.fromkeys(counted_keys(len(shot.tokens), shot.sinks) for shot in shots)
    level = level_label("layer" if head is None else "head", shots[0].layer, head)
    return captioned(
        figure,
        title,
        "Attention maps",
        level,
        f"under {', '.join(shots[0].hooks)}" if shots[0].hooks else "",
        f"rule: {rule}; scale: {shots[0].received().read(rule.quantity)[1]}; queries: {shots[0].queries}",
        f"{' / '.join(counts)}, n = 1 sequence (row {row_number(run, row)})",
    )


@plot(
    "attention-maps",
    "patterns at a few steps with the sinks marked (Figures 4, 6, 8); runs the model",
    options=("layer", "head", "row", "steps", "pick", "detector", "queries", "hooks", "model"),
)
def _draw(options: PlotOptions) -> Figure:
    layer, (_, head) = options.one_layer(), options.place()
    numbers, last = options.run.step_numbers, options.row_steps - 1
    return attention_maps(
        options.network,
        options.run,
        steps=options.steps or tuple(numbers[place] for place in dict.fromkeys((last // 4, 3 * last // 4))),
        layer=layer,
        head=head,
        row=options.row,
        hooks=options.interventions,
        detector=options.rule,
        queries=options.queries,
        title=options.name,
    )


def _of_head(shot: Snapshot, head: int | None, heads: int) -> torch.Tensor:
    """The rows of the canvas's queries in the pattern of a head, or in the mean over heads."""
    rows = shot.pattern[:, : len(shot.positions)]
    return rows.mean(0) if head is None else rows[index_of("head", head, range(heads))]


def _visible(shot: Snapshot, values: torch.Tensor) -> np.ma.MaskedArray:
    """The map without the entries that a query cannot see, and the queries that a step does not compute."""
    return np.ma.masked_array(values.numpy(), mask=~_seen(shot).numpy())


def _seen(shot: Snapshot) -> Bool[Tensor, "query key"]:
    return shot.visible[: len(shot.positions)]


def _frame(axes: Axes, shot: Snapshot) -> None:
    """Set limits with room for strips and marks; the first query is at the top."""
    keys, queries = len(shot.tokens), len(shot.positions)
    axes.set_xlim(-0.03 * keys, keys)
    axes.set_ylim(queries, -0.075 * queries)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    if shot.sinks:
        axes.axvline(keys - shot.sinks, color="white", linewidth=2.0, gid="sinks")


def _mark_masked(axes: Axes, shot: Snapshot) -> None:
    """Draw strips above masked keys and left of masked queries."""
    masked = shot.masked.float()
    colours = ListedColormap(["white", MASKED])
    keys, queries = len(shot.tokens), len(shot.positions)
    edges = torch.arange(keys + 1).numpy()
    above, beside = (-0.03 * queries, -0.008 * queries), (-0.03 * keys, -0.008 * keys)
    axes.pcolormesh(edges, above, masked[None].numpy(), cmap=colours, vmin=0, vmax=1, gid="masked")
    axes.pcolormesh(beside, edges[: queries + 1], masked[:queries, None].numpy(), cmap=colours, vmin=0, vmax=1)


def _mark_sinks(axes: Axes, shot: Snapshot, sinks: list[int]) -> None:
    height = -0.052 * len(shot.positions)
    # The largest is drawn last: on a long canvas the triangles of other sinks would cover it.
    for name, keys, face in (("sinks", sinks[1:], "white"), ("sink", sinks[:1], SINK)):
        axes.scatter(
            [key + 0.5 for key in keys],
            [height] * len(keys),
            marker="v",
            s=26,
            facecolors=face,
            edgecolors=SINK,
            linewidths=0.9,
            gid=name,
            zorder=4,
        )


def _name_tokens(axes: Axes, shot: Snapshot, sinks: list[int]) -> None:
    """Label both axes with tokens, or with every n-th of a long canvas; the main sink always has its label."""
    names = token_labels(shot.tokens, shot.tokenizer, length=8)
    every = -(-len(names) // MOST_LABELS)
    below = [key for key in range(len(names)) if key % every == 0 or key >= len(shot.positions)]
    main = sinks[:1]
    below = sorted({key for key in below if not main or abs(key - main[0]) >= every or key == main[0]} | set(main))
    axes.set_xticks([key + 0.5 for key in below], [names[key] for key in below], rotation=90, fontsize=6, **PLAIN)
    left = range(0, len(shot.positions), every)
    axes.set_yticks([query + 0.5 for query in left], [names[query] for query in left], fontsize=6, **PLAIN)
    for label, key in zip(axes.get_xticklabels(), below, strict=True):
        if main and key == main[0]:
            label.set_color(SINK)
            label.set_fontweight("bold")
    axes.tick_params(length=1.5, pad=1)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)


def _panel_title(shot: Snapshot, sinks: list[int]) -> str:
    if not sinks:
        scored = not bool(shot.received().values.isnan().all())
        return f"step {shot.step}: no {'sink by the rule' if scored else 'key has a score'}"
    main = sinks[0]
    name = token_labels([shot.tokens[main]], shot.tokenizer)[0]
    name = f'"{name}" at position {shot.positions[main] - shot.padding}' if main < len(shot.positions) else name
    return f"step {shot.step}: largest of {counted(len(sinks), 'sink')} is {name}"


def _hidden(shots: Sequence[Snapshot]) -> str | None:
    """What the entries that are left out are; None where there are none."""
    rows = torch.cat([_seen(shot).any(-1) for shot in shots])
    if not bool(rows.all()):
        return "not computed at the step (cache), or not visible"
    return None if all(bool(_seen(shot).all()) for shot in shots) else "not visible to the query"


def _explain(figure: Figure, *, masked: str | None, sinks: bool, hidden: str | None) -> None:
    handles: list[Artist] = []
    if sinks:
        mark: dict[str, Any] = {"linestyle": "", "marker": "v", "markersize": 5, "color": SINK}
        handles += [Line2D([], [], label="largest sink", **mark), Line2D([], [], mfc="white", label="sink", **mark)]
    if masked:
        handles.append(Patch(facecolor=MASKED, label=masked))
    if hidden:
        handles.append(Patch(facecolor=INVISIBLE, label=hidden))
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=7, frameon=False)
