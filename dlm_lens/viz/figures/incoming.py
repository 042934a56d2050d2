"""`incoming_attention`: the attention that every token receives, step by step (2510.15731, Figure 1).

`sink_discount`: how much of a sink each position of a run's canvases is, as pruning discounts it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from dlm_lens.arguments import checked_arguments, instance
from dlm_lens.printable import counted
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling.denoising_run import holds_random_tokens
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sinks import Received
from dlm_lens.viz.figures.labels import (
    PLAIN,
    SCALE_LABELS,
    captioned,
    counted_keys,
    level_label,
    note,
    open_label,
    step_ticks,
    token_labels,
)
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, many, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import Selection, as_received, choose, index_of, row_number, step_places

COLOURS = "viridis"
UNDEFINED = "#d9d9d9"


@checked_arguments(steps=None)
@own_colours()
def incoming_attention(
    received: Received | Recording,
    *,
    layer: int | None,
    head: int | None,
    row: int = 0,
    steps: Sequence[int] | None = None,
    queries: QueryClass = "all",
    title: str = "",
) -> Figure:
    """Heat map of the attention that every position receives (across) at every step (down).

    After Figure 1 of 2510.15731. The tokens on the axis are those of the final text. A dot marks a position that is
    still masked at that step; a grey cell has no defined score. Padding is not drawn.

    Args:
        received: from `received_over_steps`, or a recording with ReceivedAttention.
        layer: index of the layer in the model; None for the mean over layers and heads.
        head: index of the head; None for the mean over heads.
        row: index of the sequence in the batch.
        steps: the steps of the run to show, in this order; None for all that the row ran.
        queries: which queries count, of a recording; a `Received` has its own.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: a layer, head, row or step that the recording does not have.
    """
    shown, received = choose(received, layer, head, row, queries), as_received(received, queries)
    level = level_label(shown.level, layer, head, shown.layers, shown.heads)
    numbers = received.step_numbers
    # A row that has ended has no scores at later steps.
    chosen = list(range(shown.steps)) if steps is None else step_places(steps, numbers)
    positions = shown.content.tolist()
    scores = shown.scores[chosen][:, shown.content].numpy()
    width, height = min(20.0, max(5.5, 0.125 * len(positions) + 1.6)), min(14.0, max(3.6, 0.1 * len(chosen) + 2.0))
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps[COLOURS].with_extremes(bad=UNDEFINED)
    mesh = draw_cells(axes, np.ma.masked_invalid(scores), cmap=colours, vmin=0)
    axes.invert_yaxis()
    masked = None if shown.masked is None else shown.masked[chosen][:, shown.content].numpy()
    if masked is not None:
        _mark_masked(axes, masked, 72 * min((width - 1.6) / len(positions), (height - 2.0) / len(chosen)))
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.04)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(f"{SCALE_LABELS[received.scale]}\n{level}", fontsize=8, **PLAIN)
    _name_axes(axes, shown, positions, [numbers[place] for place in chosen])
    dots = masked is not None and bool(masked.any())
    if not bool(np.isfinite(scores).any()):
        note(axes, "no key has a score at these steps")
    label = open_label(holds_random_tokens(received.tokens, received.masked)) if dots else None
    _explain(figure, received.min_viewers, masked=label, undefined=bool(np.isnan(scores).any()))
    return captioned(
        figure,
        title,
        "Incoming attention",
        f"scale: {received.scale}",
        level,
        f"queries: {received.queries}",
        f"{counted_keys(len(positions), received.sinks)}, {counted(len(chosen), 'step')}, n = 1 sequence "
        f"(row {shown.row})",
        axes=axes,
    )


@plot(
    "incoming-attention",
    "what every token receives, step by step (2510.15731, Figure 1)",
    options=("layer", "head", "row", "steps", "pick", "queries"),
    needs="received",
)
def _draw(options: PlotOptions) -> Figure:
    layer, head = options.place()
    return incoming_attention(
        options.recording,
        layer=layer,
        head=head,
        row=options.row,
        steps=options.steps or None,
        queries=options.queries,
        title=options.name,
    )


def _mark_masked(axes: Axes, masked: Bool[np.ndarray, "step position"], side: float) -> None:
    """Draw a dot in every masked cell; `side` is that of a cell, in points."""
    step, position = masked.nonzero()
    across = min(5.0**0.5, 0.45 * side)
    # White with a dark rim, which is visible on every colour of the map.
    rim: dict[str, Any] = {"edgecolors": "black", "linewidths": min(0.25, 0.12 * across)}
    axes.scatter(
        position + 0.5, step + 0.5, s=across**2, c="white", gid="masked", rasterized=many(len(step)), **rim
    )


def _name_axes(axes: Axes, shown: Selection, positions: list[int], steps: list[int]) -> None:
    """Label the axes: tokens below, positions (from the prompt's first token) above, steps on the left."""
    every = -(-len(positions) // 110)
    named = range(0, len(positions), every)
    if shown.final is None:
        axes.set_xticks([])
    else:
        tokens = token_labels([shown.final[positions[i]] for i in named], shown.received.tokenizer)
        axes.set_xticks([i + 0.5 for i in named], tokens, rotation=90, fontsize=6.5, **PLAIN)
        axes.set_xlabel("token in the final text", fontsize=8)
    above = axes.secondary_xaxis("top")
    sinks = shown.received.sinks
    if sinks:
        axes.axvline(len(positions) - sinks, color="white", linewidth=2.5, gid="sinks")
    first = positions[0] if positions else 0
    labels = [position - first for position in positions[: len(positions) - sinks]]
    numbered = [i for i, position in enumerate(labels) if position % (8 * every) == 0]
    above.set_xticks([i + 0.5 for i in numbered], [str(labels[i]) for i in numbered], fontsize=7)
    above.set_xlabel("position", fontsize=8)
    skip = -(-len(steps) // 16)
    axes.set_yticks([i + 0.5 for i in range(0, len(steps), skip)], [str(s) for s in steps[::skip]], fontsize=7)
    axes.set_ylabel("step", fontsize=8)


def _explain(figure: Figure, viewers: int, *, masked: str | None, undefined: bool) -> None:
    handles: list[Artist] = []
    if masked:
        dot = Line2D([], [], linestyle="", marker="o", markersize=4, mfc="white", mec="black", mew=0.4)
        dot.set_label(masked)
        handles.append(dot)
    if undefined:
        handles.append(
            Patch(facecolor=UNDEFINED, label=f"undefined (visible to fewer than {viewers} counted queries)")
        )
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=7, frameon=False)


@checked_arguments(weights=instance(Tensor, "the weights of sink_weights, [step, batch, position]"))
@own_colours()
def sink_discount(
    weights: Float[Tensor, "step batch position"], run: RunLike, *, row: int = 0, title: str = ""
) -> Figure:
    """The weights of `sink_weights` over steps (across) and positions (down), 0 to 1; dots are open positions.

    Args:
        weights: from `sink_weights`, of the run.
        run: the run.
        row: index of the sequence.
        title: the beginning of the caption, such as the model's name.

    Raises:
        ValueError: weights of another run, or a row that does not exist.
    """
    run = as_run(run)
    if weights.shape != run.unmasked.shape:
        raise ValueError(
            f"the weights have shape {list(weights.shape)}, the run {list(run.unmasked.shape)}; give the run of "
            "which sink_weights computed them, or compute those of this one"
        )
    index_of("row", row, range(weights.shape[1]))
    there = run.attention_mask[row].nonzero().flatten()
    steps, width = int(run.row_steps[row]), 6.4  # a row that has ended has no weights
    values = weights[:steps, row][:, there].T.double()
    figure = NotebookFigure(figsize=(width, min(12.0, max(2.6, 0.11 * len(there) + 1.0))), layout="constrained")
    axes = figure.add_subplot()
    mesh = draw_cells(axes, values.numpy(), cmap="viridis", vmin=0, vmax=1)
    dots = run.open[:steps, row][:, there].T.nonzero()
    axes.scatter(dots[:, 1] + 0.5, dots[:, 0] + 0.5, s=1.5, color="white", gid="open", rasterized=many(len(dots)))
    axes.invert_yaxis()
    skip = -(-len(there) // 40)
    labels = token_labels(run.tokens[row, there].tolist(), run.tokenizer)
    shown = torch.arange(0, len(there), skip).tolist()
    axes.set_yticks([place + 0.5 for place in shown], [labels[place] for place in shown], fontsize=6, **PLAIN)
    axes.set_xlabel("step", fontsize=8)
    step_ticks(axes, run.step_numbers[:steps])
    bar = figure.colorbar(mesh, ax=axes, pad=0.01)
    bar.set_label("discount of the position", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    mean = float(values.sum(0).mean())
    return captioned(
        figure,
        title,
        "How much of a sink each position is, over layers and heads",
        f"{mean:.2f} positions discounted per canvas; dots: open; n = 1 sequence (row {row_number(run, row)})",
    )
