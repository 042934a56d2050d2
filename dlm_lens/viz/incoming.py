"""`incoming_attention`: Figure 1 of 2510.15731, what every token receives, step by step."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlm_lens.sinks import Received
from dlm_lens.viz.choice import Shown, choose
from dlm_lens.viz.labels import PLAIN, SCALE_LABELS, caption, level_label, token_labels

COLOURS = "cividis"
UNDEFINED = "#d9d9d9"


def incoming_attention(
    received: Received,
    *,
    layer: int | None,
    head: int | None,
    row: int = 0,
    steps: Sequence[int] | None = None,
    title: str = "",
) -> Figure:
    """Heat map of the attention that every position receives (across) at every step (down).

    After Figure 1 of 2510.15731. The tokens on the axis are the final text; a dot marks a cell whose position
    is still masked at that step, a grey cell has no defined score. Padding is left out.

    Args:
        received: from `received_over_steps`.
        layer: index of the layer in the model; None for the mean over layers and heads.
        head: index of the head; None for the mean over heads.
        row: which sequence of the batch.
        steps: the steps to show, in this order; None for all.
        title: what stands in front of the caption, such as the model's name.

    Raises:
        TypeError: not a `Received`.
        ValueError: a layer, head, row or step that is not there.
    """
    shown = choose(received, layer, head, row)
    chosen = _steps(shown, steps)
    positions = shown.content.tolist()
    scores = shown.scores[chosen][:, shown.content].numpy()
    width = min(20.0, max(5.5, 0.165 * len(positions) + 1.8))
    figure = Figure(figsize=(width, min(14.0, max(3.2, 0.1 * len(chosen) + 2.2))), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps[COLOURS].copy()
    colours.set_bad(UNDEFINED)
    mesh = axes.pcolormesh(np.ma.masked_invalid(scores), cmap=colours, vmin=0)
    axes.invert_yaxis()
    if shown.masked is not None:
        _mark_masked(axes, shown.masked[chosen][:, shown.content].numpy())
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.04)
    bar.set_label(f"{SCALE_LABELS[received.scale]}\n{level_label(shown.level, layer, head)}", fontsize=8, **PLAIN)
    _name_axes(axes, shown, positions, chosen)
    sentences = [
        *([title] if title else []),
        "Incoming attention",
        f"scale: {received.scale}",
        level_label(shown.level, layer, head),
        f"queries: {received.queries}",
        f"{len(positions)} positions, {len(chosen)} steps, n = 1 sequence (row {row})",
    ]
    axes.set_title(caption(sentences, width), loc="left", fontsize=8, **PLAIN)
    return figure


def _steps(shown: Shown, steps: Sequence[int] | None) -> list[int]:
    count = len(shown.scores)
    chosen = list(range(count)) if steps is None else [int(step) for step in steps]
    for step in chosen:
        if not 0 <= step < count:
            raise ValueError(f"step {step} is not there; steps go from 0 to {count - 1}")
    if not chosen:
        raise ValueError("steps is empty; give at least one, or None for all")
    return chosen


def _mark_masked(axes: Axes, masked: np.ndarray) -> None:
    step, position = masked.nonzero()
    dots = axes.scatter(position + 0.5, step + 0.5, s=2.5, c="white", linewidths=0, label="still masked")
    dots.set_gid("masked")


def _name_axes(axes: Axes, shown: Shown, positions: list[int], chosen: list[int]) -> None:
    every = -(-len(positions) // 110)
    places = range(0, len(positions), every)
    labels = [str(positions[i]) for i in places]
    if shown.final is not None:
        tokens = token_labels([shown.final[positions[i]] for i in places], shown.received.tokenizer)
        labels = [f"{token}  {position}" for token, position in zip(tokens, labels, strict=True)]
    axes.set_xticks([i + 0.5 for i in places], labels, rotation=90, fontsize=6.5, **PLAIN)
    skip = -(-len(chosen) // 16)
    axes.set_yticks([i + 0.5 for i in range(0, len(chosen), skip)], [str(s) for s in chosen[::skip]], fontsize=7)
    axes.set_xlabel("token of the final text, canvas position", fontsize=8)
    axes.set_ylabel("denoising step", fontsize=8)
