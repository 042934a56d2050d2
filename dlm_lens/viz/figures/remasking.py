"""`remask_spread`: how far masking decided positions again changes a run."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlm_lens.arguments import checked_arguments
from dlm_lens.probes import RemaskSensitivity
from dlm_lens.viz.figures.commitment import MOST_LABELS
from dlm_lens.viz.figures.labels import PLAIN, caption, step_ticks, token_labels, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, draw_cells, own_colours
from dlm_lens.viz.selection import index_of, row_number

STATES = {
    "same token": "#ffffff",
    "another token": "#f4a582",
    "masked again, same token": "#d1e5f0",
    "masked again, another token": "#b2182b",
}
"""What a cell says -> its colour."""

LINES = {"direct": ("#b2182b", "o-", "masked again"), "collateral": ("#e08214", "^--", "all others")}
"""Colour, marks and dashes, and name of a line; equal shares are drawn over each other."""


@checked_arguments()
@own_colours()
def remask_spread(found: RemaskSensitivity, *, row: int = 0, title: str = "") -> Figure:
    """Where a run ends with another token after positions were masked again, by the step at which they were.

    Left: positions of the answer down, labelled with the plain run's tokens; a column for each changed run. Right:
    the share of changed tokens over all rows, with 95% intervals over prompts.

    Args:
        found: from `probes.remask`.
        row: index of the sequence on the left.
        title: the beginning of the caption.

    Raises:
        TypeError: no `RemaskSensitivity`.
        ValueError: a row that the run does not have.
    """
    if not isinstance(found, RemaskSensitivity):
        raise TypeError(f"this is a {type(found).__name__}; give a RemaskSensitivity of probes.remask")
    run = found.run
    index_of("row", row, range(len(run.tokens)))
    where = run.open[0, row].nonzero().flatten()
    states = found.changed[:, row].long() + 2 * found.remasked[:, row].long()
    height = min(10.0, max(3.2, 0.17 * len(where) + 1.4))
    width = min(13.0, max(7.5, 0.2 * len(found.steps) + 5.5))
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _draw_row(left, states[:, where], found)
    skip = -(-len(where) // MOST_LABELS)
    labels = token_labels(run.tokens[row, where].tolist(), run.tokenizer)
    left.set_yticks([place + 0.5 for place in range(0, len(where), skip)], labels[::skip], fontsize=7, **PLAIN)
    handles = [Patch(facecolor=colour, edgecolor="0.6", label=name) for name, colour in STATES.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=7, frameon=False)
    _draw_shares(right, found)
    prompts = int(found.remasked.any(-1).any(0).sum())  # the others had ended, and have no share
    sentences = [
        *([title] if title else []),
        "Tokens that change when decided positions are masked again",
        f"left: n = 1 sequence (row {row_number(found.run, row)}); right: n = {prompts}"
        + ", band: 95% interval" * (prompts > 1),
    ]
    figure.suptitle(caption(sentences, width), fontsize=8, x=0.01, ha="left", **PLAIN)
    return figure


def _draw_row(axes: Axes, states: torch.Tensor, found: RemaskSensitivity) -> None:
    """The cells of a row, a column for each changed run."""
    draw_cells(
        axes, states.T.numpy(), cmap=ListedColormap(list(STATES.values())), vmin=-0.5, vmax=len(STATES) - 0.5
    )
    axes.invert_yaxis()
    step_ticks(axes, _numbers(found))
    axes.set_xlabel("step at which positions were masked again", fontsize=8)
    axes.set_ylabel("position, by the plain run's token", fontsize=8)


def _numbers(found: RemaskSensitivity) -> list[int]:
    return [found.run.step_numbers[step] for step in found.steps]


def _draw_shares(axes: Axes, found: RemaskSensitivity) -> None:
    """Lines of the changed shares by step; a gap where no row has such positions."""
    for name, (colour, style, label) in LINES.items():
        known, ends = np.isfinite(getattr(found, name).numpy()).any(1), ("value", "low", "high")
        means = (found.mean(name, step) if there else None for step, there in zip(found.steps, known, strict=True))
        each = np.array([[np.nan if one is None else getattr(one, end) for end in ends] for one in means])
        steps = _numbers(found)
        axes.plot(steps, each[:, 0], style, color=colour, markersize=3, label=label, gid=name)
        draw_band(axes, steps, each[:, 1], each[:, 2], colour=colour, alpha=0.15)
    axes.set_ylim(-0.02, 1.05)
    whole_ticks(axes.xaxis)
    axes.tick_params(labelsize=7)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("share of changed tokens", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
