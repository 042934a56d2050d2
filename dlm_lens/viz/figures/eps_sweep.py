"""`sinks_over_eps`: how many keys are sinks as the threshold grows (2510.15731, Figure 10)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from dlm_lens.arguments import checked_arguments, or_none, real
from dlm_lens.printable import counted
from dlm_lens.recording import Recording
from dlm_lens.sinks import AboveMean, Level, Received, eps_sweep
from dlm_lens.viz.figures.labels import LogShares, captioned, note, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received

EPS = tuple(round(0.25 * i, 2) for i in range(1, 65))
"""0.25 to 16 in quarters."""

DASHES = ("-", "--", "-.", ":")

COLOURS = ListedColormap(colormaps["viridis"](np.linspace(0, 0.8, 256)))
"""Of lengths; the brightest yellow is too pale for a line."""

MOST_LENGTHS = 6
"""Lengths that the legend names; more have a colour bar."""


@checked_arguments(marked=or_none(real(), "for no line"))
@own_colours()
def sinks_over_eps(
    sweep: pd.DataFrame | Received | Recording,
    eps_values: Sequence[float] | None = None,
    *,
    level: Level = "head",
    marked: float | None = 3.0,
    title: str = "",
) -> Figure:
    """Share of keys that are sinks by Eq. 3, and of patterns that have one, as eps grows.

    After Figure 10 of 2510.15731. One line for every sequence length S, since scores relative to uniform range from
    0 to S: the same eps is another share of attention at another length. Bands are 95% intervals (bootstrap over
    prompts; none for one).

    Args:
        sweep: the table of `eps_sweep`, a `Received` or a recording.
        eps_values: thresholds for a `Received` or a recording; 0.25 to 16 in quarters by default.
        level: which patterns are judged; ignored for a table, which has its own.
        marked: the eps at which to draw a line, 3 in the paper; None for no line.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: another type, or a table and eps_values.
        ValueError: a table without the columns of `eps_sweep`.
    """
    if isinstance(sweep, pd.DataFrame):
        if eps_values is not None:
            raise TypeError("the table has its own eps; eps_values go with a Received or a Recording")
        table = sweep
    else:
        table = eps_sweep(as_received(sweep), EPS if eps_values is None else eps_values, level=level)
    wanted = {"S", "eps", "kept", "low", "high", "with_sink", "n", "sequences", "scale", "level", "queries"}
    if not wanted <= set(table) or table.empty:
        raise ValueError(f"the table has the columns {', '.join(map(str, table))}; give that of eps_sweep")
    figure = NotebookFigure(figsize=(7.6, 3.7), layout="constrained")
    keys, patterns = figure.subplots(1, 2, sharex=True)
    if (table["n"] > 0).any():  # a sequence that is over before a part of a run has no keys, and no line
        table = table[table["n"] > 0]
    lengths = sorted(table["S"].unique())
    _draw_lengths(keys, patterns, table, lengths)
    if len(lengths) > MOST_LENGTHS:
        _add_bar(figure, [keys, patterns], lengths)
    keys.set_yscale("log")
    keys.yaxis.set_minor_formatter(LogShares())
    lowest = table.loc[table["kept"] > 0, "kept"].min()
    keys.set_ylim(bottom=0.5 * lowest if np.isfinite(lowest) else 0.01, top=1.0)
    patterns.set_ylim(0, 1.02)
    for axes, what in ((keys, "keys that are sinks"), (patterns, "patterns with a sink")):
        _name_axes(axes, what, table["scale"].iloc[0], marked)
    if keys.get_legend_handles_labels()[0]:
        keys.legend(fontsize=7, frameon=False)
    if not bool((table["kept"] > 0).any()):
        note(keys, "no key is a sink at any of these eps" if (table["n"] > 0).any() else "no key has a score")
    return captioned(
        figure,
        title,
        "Sinks by score > mean of the others + eps",
        f"scale: {table['scale'].iloc[0]}",
        f"level: {table['level'].iloc[0]}",
        f"queries: {table['queries'].iloc[0]}",
        f"n = {int(table.groupby('S')['n'].first().sum())} keys of "
        f"{counted(int(table.groupby('S')['sequences'].first().sum()), 'sequence')}, all steps",
    )


@plot(
    "sinks-over-eps",
    "share of keys that are sinks as eps of Eq. 3 grows (Figure 10); marks the eps of --detector above-mean:EPS",
    options=("detector", "queries", "level"),
    needs="received",
)
def _draw(options: PlotOptions) -> Figure:
    if not isinstance(options.rule, AboveMean):
        raise ValueError(f"sinks-over-eps marks an eps of above-mean; {options.rule} has none")
    return sinks_over_eps(options.received, level=options.level, marked=options.rule.eps, title=options.name)


def _draw_lengths(keys: Axes, patterns: Axes, table: pd.DataFrame, lengths: Sequence[int]) -> None:
    """Draw a line for every length, dashed and named where a legend has room for all."""
    few = len(lengths) <= MOST_LENGTHS
    for number, length in enumerate(lengths):
        lines = table[table["S"] == length].sort_values("eps")
        eps = lines["eps"].to_numpy()
        share = number / max(1, len(lengths) - 1) if few else (length - lengths[0]) / (lengths[-1] - lengths[0])
        colour, dash = COLOURS(share), DASHES[number % len(DASHES)] if few else "-"
        label = f"S = {length} ({counted(int(lines['sequences'].iloc[0]), 'sequence')})" if few else None
        kept = np.where(lines["kept"] > 0, lines["kept"], np.nan)
        style: dict[str, Any] = {"color": colour, "linewidth": 1.6 if few else 0.8}
        keys.plot(eps, kept, dash, label=label, gid="kept", **style)
        low, high = lines["low"].clip(lower=1e-9), lines["high"]
        # As in score_distribution: no band of a few prompts where no key is a sink.
        keys.fill_between(eps, low, high, where=lines["kept"] > 0, color=colour, alpha=0.2, linewidth=0)
        patterns.plot(eps, lines["with_sink"], dash, gid="with sink", **style)


def _add_bar(figure: Figure, panels: Sequence[Axes], lengths: Sequence[int]) -> None:
    scale = ScalarMappable(Normalize(lengths[0], lengths[-1]), COLOURS)
    bar = figure.colorbar(scale, ax=list(panels), pad=0.01, fraction=0.04)
    bar.set_label(f"sequence length S ({len(lengths)} lengths)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    whole_ticks(bar.ax.yaxis)


def _name_axes(axes: Axes, what: str, scale: str, marked: float | None) -> None:
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_ylabel(what, fontsize=8)
    axes.set_xlabel(f"eps ({scale})", fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.grid(color="0.9", linewidth=0.6)
    if marked is not None:
        axes.axvline(marked, color="0.45", linewidth=1.0, label=f"eps = {marked:g}", gid="marked")
