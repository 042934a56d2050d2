"""`commitment_map`: when the predictions of a run settle on their final tokens, and how sure they are.

`remask_spread`: how far masking decided positions again changes a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlm_lens.arguments import checked_arguments
from dlm_lens.probes import RemaskSensitivity
from dlm_lens.probes.commitments import Commitment, commitment, proposed_commitment, why_drawn
from dlm_lens.viz.figures.labels import PLAIN, captioned, step_ticks, token_labels, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, draw_cells, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import index_of, row_number

STATES = {
    "decided, or not predicted": "#ffffff",
    "predicts another token": "#f4a582",
    "predicts the final token, not for good yet": "#d1e5f0",
    "committed: predicts it to the end": "#4393c3",
    "predicts the final token, not known if for good": "#bdbdbd",
}
"""What a cell says -> its colour. The last, of positions whose decision was not read, is in the legend of these."""

UNKNOWN = len(STATES) - 1

MOST_LABELS = 60

OUTCOMES = {
    "same token": "#ffffff",
    "another token": "#f4a582",
    "masked again, same token": "#d1e5f0",
    "masked again, another token": "#b2182b",
}
"""What a cell of `remask_spread` says -> its colour."""

LINES = {"direct": ("#b2182b", "o-", "masked again"), "collateral": ("#e08214", "^--", "all others")}
"""Colour, marks and dashes, and name of a line; equal shares are drawn over each other."""


@checked_arguments()
@own_colours()
def commitment_map(found: Commitment, *, row: int = 0, title: str = "") -> Figure:
    """Every open position of the answer at every step: does the model predict its final token, and for good?

    Left: positions of the answer down, labelled with their numbers (from the prompt's first token) and final
    tokens, steps across; a dot marks the step that decided a position. Where that step was not read (it is not in a
    part of a run, or it rewrote the position and `Commitment.unknown` says so), a cell does not say whether it is
    for good. Right: confidence and accuracy of the predictions of all rows by step, where known.

    Args:
        found: from `probes.commitment` or `probes.proposed_commitment`.
        row: index of the sequence.
        title: the beginning of the caption.

    Raises:
        TypeError: no `Commitment`.
        ValueError: a row that the run does not have, or a row without a prediction.
    """
    if not isinstance(found, Commitment):
        raise TypeError(f"this is a {type(found).__name__}; give a Commitment of probes.commitment")
    run = found.run
    index_of("row", row, range(len(run.tokens)))
    where = (found.followed[:, row] >= 0).any(0).nonzero().flatten()
    if not len(where):
        raise ValueError(f"row {row} has no prediction at an open position; take another row")
    cells, height = _states(found, row)[:, where], min(10.0, max(3.0, 0.17 * len(where) + 1.4))
    width = min(13.0, max(7.5, 0.12 * run.steps + 5.0))
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    _draw_states(left, cells, STATES)
    decided = found.decided_at[row, where]
    places = torch.arange(len(where))[decided >= 0]
    left.plot(decided[decided >= 0] + 0.5, places + 0.5, ".", color="black", markersize=3, gid="decided")
    tokens = token_labels(run.tokens[row, where].tolist(), run.tokenizer)
    numbers = (where - run.padding[row]).tolist()  # from the prompt's first token, as in every figure
    labels = [f"{position}: {token}" for position, token in zip(numbers, tokens, strict=True)]
    _label_rows(left, labels)
    left.set_xlabel("step", fontsize=8)
    left.set_ylabel("position: final token", fontsize=8)
    _explain(figure, list(STATES.items())[: None if bool((cells == UNKNOWN).any()) else UNKNOWN], 2)
    step_ticks(left, run.step_numbers)
    _draw_confidence(right, found)
    # As `calibration` counts: a prompt that is over in a part of a run has no prediction.
    prompts = int((found.predicted & (found.reference >= 0)).any(-1).any(0).sum())
    return captioned(
        figure,
        title,
        "When predictions settle",
        f"left: n = 1 sequence (row {row_number(run, row)}); right: n = {prompts}",
        f"mean lead {found.mean_lead} steps",
    )


def _states(found: Commitment, row: int) -> torch.Tensor:
    """The index in `STATES` of every step and position of a row's result."""
    steps, read = torch.arange(found.run.steps)[:, None], found.followed[:, row]
    same = read == found.run.tokens[row]
    committed = found.committed_at[row]
    for_good = same & (committed >= 0) & (steps >= committed)
    states = (1 + same.long() + for_good.long()).masked_fill(same & (committed < 0), UNKNOWN)
    return states.masked_fill(read < 0, 0)


def _draw_confidence(axes: Axes, found: Commitment) -> None:
    """Lines of confidence and accuracy by step, with the positions that were predicted at each."""
    table = found.calibration()
    drawn = table[table["predictions"] > 0]
    for name, colour, style in (("confidence", "#2166ac", "s-"), ("accuracy", "#b2182b", "o--")):
        if name in drawn and bool(np.isfinite(drawn[name].astype(float)).any()):
            line: dict[str, Any] = {"color": colour, "markersize": 3, "linewidth": 1.2, "label": name, "gid": name}
            axes.plot(drawn["step"], drawn[name], style, **line)
    _finish_shares(axes, "mean over open positions")


def _draw_states(axes: Axes, states: torch.Tensor, colours: Mapping[str, str]) -> None:
    """A column for each step, with a cell for each position in the colour of its state; the first row on top."""
    palette = ListedColormap(list(colours.values()))
    draw_cells(axes, states.T.numpy(), cmap=palette, vmin=-0.5, vmax=len(colours) - 0.5)
    axes.invert_yaxis()


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """The labels of the rows; at most `MOST_LABELS` are written."""
    skip = -(-len(labels) // MOST_LABELS)
    axes.set_yticks([place + 0.5 for place in range(0, len(labels), skip)], labels[::skip], fontsize=7, **PLAIN)


def _explain(figure: Figure, states: Iterable[tuple[str, str]], columns: int) -> None:
    """The legend of the states' colours."""
    handles = [Patch(facecolor=colour, edgecolor="0.6", label=name) for name, colour in states]
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=7, frameon=False)


def _finish_shares(axes: Axes, label: str) -> None:
    """The axes and the legend of lines of shares by step."""
    axes.set_ylim(-0.02, 1.05)
    whole_ticks(axes.xaxis)
    axes.tick_params(labelsize=7)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    # Above the axes: where the lines vary over the whole height, there is no place among them.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=7, frameon=False)


@plot(
    "commitment-map",
    "when a run's own proposals settle on their final tokens; where they are drawn (temperature, uniform noise) or "
    "with --model the model's predictions, for which it runs the model",
    options=("row", "model"),
)
def _draw(options: PlotOptions) -> Figure:
    if options.model or why_drawn(options.run):
        found = commitment(options.network, options.run, progress=True)
    else:
        found = proposed_commitment(options.recording)
    return commitment_map(found, row=options.row, title=options.name)


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
    _draw_states(left, states[:, where], OUTCOMES)
    step_ticks(left, _numbers(found))
    left.set_xlabel("step at which positions were masked again", fontsize=8)
    left.set_ylabel("position, by the plain run's token", fontsize=8)
    _label_rows(left, token_labels(run.tokens[row, where].tolist(), run.tokenizer))
    _explain(figure, OUTCOMES.items(), 4)
    _draw_shares(right, found)
    prompts = int(found.remasked.any(-1).any(0).sum())  # the others had ended, and have no share
    return captioned(
        figure,
        title,
        "Tokens that change when decided positions are masked again",
        f"left: n = 1 sequence (row {row_number(found.run, row)}); right: n = {prompts}"
        + ", band: 95% interval" * (prompts > 1),
    )


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
    _finish_shares(axes, "share of changed tokens")
