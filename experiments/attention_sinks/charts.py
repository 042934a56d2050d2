"""Line charts and heat maps of the experiments' results; every colour comes with a marker or a line style."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MARKS = "osD^vP*X"
STYLES = ("-", "--", ":", "-.")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")


def line_chart(
    curves: Mapping[str, Sequence[tuple[float, Any]]],
    *,
    x: str,
    y: str,
    ticks: Sequence[str] = (),
    styles: Mapping[str, tuple[int, int]] | None = None,
) -> Figure:
    """Curves of (x, number or interval); an interval is drawn as an error bar.

    Args:
        curves: points by the name of the curve.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        ticks: names of the positions 0, 1, ... of the horizontal axis.
        styles: per curve, the index of its colour and marker and the index of its line style; by default every
            curve has its own of each.
    """
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        colour, line = (number, number) if styles is None else styles[name]
        _draw(axes, name, points, colour, line)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    if ticks:
        axes.set_xticks(range(len(ticks)), ticks, rotation=20 if len(ticks) > 4 else 0)
    if curves:
        figure.legend(loc="outside lower left", ncols=2, fontsize=7, frameon=False)
    return figure


def line_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Any]]]], *, x: str, y: str, columns: int = 2
) -> Figure:
    """`line_chart`s side by side on the same axes; equal names of curves have equal styles."""
    rows, width = -(-len(panels) // columns), min(columns, max(1, len(panels)))
    figure = Figure(figsize=(3.2 * width, 2.6 * max(rows, 1) + 0.6), layout="constrained")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    shared, drawn = None, {}
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes = shared = figure.add_subplot(rows, width, number, sharex=shared, sharey=shared)
        for name, points in curves.items():
            drawn[name] = _draw(axes, name, points, names.index(name), names.index(name))
        axes.set_title(title, loc="left", fontsize=8, parse_math=False)
        axes.set_xlabel(x, fontsize=7)
        axes.set_ylabel(y, fontsize=7)
        axes.tick_params(labelsize=6)
    if drawn:
        figure.legend(drawn.values(), drawn, loc="outside lower left", ncols=2, fontsize=7, frameon=False)
    return figure


def heat_maps(
    panels: Mapping[str, Any], *, x: str, y: str, bar: str, marks: Mapping[str, Any] | None = None
) -> Figure:
    """Matrices side by side, each with its own colour scale; `marks` are (x, y) points of a panel."""
    rows, width = -(-len(panels) // 2), min(2, len(panels))
    figure = Figure(figsize=(3.6 * width + 0.6, 3.1 * rows + 0.3), layout="constrained")
    for number, (name, values) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, width, number)
        data = np.ma.masked_invalid(np.asarray(values, float))
        mesh = axes.pcolormesh(data, cmap="viridis", vmin=0)
        axes.set_facecolor("#d9d9d9")
        axes.set_ylim(len(data), 0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        for place in (marks or {}).get(name, ()):
            axes.plot(place[0] + 0.5, place[1], marker="v", color="black", markersize=6, clip_on=False)
        axes.set_title(name, loc="left", fontsize=8, pad=9, parse_math=False)
        axes.set_xlabel(x, fontsize=7)
        axes.set_ylabel(y, fontsize=7)
        axes.tick_params(labelsize=6)
        shown = figure.colorbar(mesh, ax=axes, fraction=0.05, pad=0.02)
        shown.ax.tick_params(labelsize=6)
        shown.set_label(bar, fontsize=6)
    return figure


def scatter_plots(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    diagonal: bool = False,
) -> Figure:
    """Points of several kinds, one panel per name; the kinds share the axes of a panel.

    Args:
        panels: points (x, y) by kind, by the name of the panel.
        x: label of the horizontal axes.
        y: label of the vertical axes.
        diagonal: draw the line on which both numbers are equal.
    """
    rows, width = -(-len(panels) // 2), min(2, len(panels))
    # The kinds of the first panel are explained below all panels; others have their own legend.
    shown = next(iter(panels.values()), {}).keys()
    figure = Figure(figsize=(3.4 * width + 0.4, 2.8 * rows + 0.3), layout="constrained")
    for number, (name, kinds) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, width, number)
        for place, (kind, points) in enumerate(kinds.items()):
            data = np.asarray(points, float).reshape(-1, 2)
            drawn: dict[str, Any] = {"color": COLOURS[place % 8], "marker": MARKS[place % 8], "label": kind}
            axes.scatter(data[:, 0], data[:, 1], s=9, alpha=0.7, **drawn)
        axes.set_ylim(bottom=0)
        if diagonal:
            axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
            axes.set_xlim(left=0)
        axes.set_title(name, loc="left", fontsize=8, parse_math=False)
        axes.set_xlabel(x, fontsize=7)
        axes.set_ylabel(y, fontsize=7)
        axes.tick_params(labelsize=6)
        if len(kinds) > 1 and kinds.keys() != shown:
            axes.legend(fontsize=6, frameon=False)
    if len(shown) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, fontsize=7)
    return figure


def forest_plot(
    rows: Mapping[str, Any],
    points: Mapping[str, Sequence[float]] | None = None,
    *,
    x: str,
    shaded: tuple[float, float] | None = None,
) -> Figure:
    """One line per name: a number with its interval, and small circles for the cases that it is the mean of.

    A vertical line is at 0, no effect.

    Args:
        rows: Interval by name, the first on top.
        points: the single cases by name.
        x: label of the axis.
        shaded: ends of the grey range, such as a margin of equivalence.
    """
    figure = Figure(figsize=(6.0, 0.8 + 0.38 * max(1, len(rows))), layout="constrained")
    axes = figure.add_subplot()
    if shaded is not None:
        axes.axvspan(*shaded, color="#e6e6e6", zorder=0)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    for place, (name, found) in enumerate(rows.items()):
        low, high = _ends(found)
        single = list((points or {}).get(name, ()))
        axes.plot(
            single, [place + 0.22] * len(single), "o", color=COLOURS[0], markersize=3, fillstyle="none", zorder=3
        )
        if np.isfinite([low, high]).all():
            axes.plot([low, high], [place, place], color=COLOURS[1], linewidth=1.5, zorder=2)
        axes.plot([_centre(found)], [place], "D", color=COLOURS[1], markersize=5, zorder=4)
    axes.set_yticks(range(len(rows)), list(rows))
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=8)
    return figure


def path_panels(
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    *,
    bands: Mapping[str, Sequence[tuple[int, int]]],
) -> Figure:
    """Positions of the largest sink over steps, several paths in every panel; None interrupts a path.

    Args:
        panels: by the panel's title, the paths by their names.
        bands: per panel, the positions (start, stop) that are shaded at every step.
    """
    rows, width = -(-len(panels) // 3), min(3, len(panels))
    figure = Figure(figsize=(3.4 * width + 0.3, 2.9 * rows + 0.2), layout="constrained")
    for number, (name, paths) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, width, number)
        for step, (start, stop) in enumerate(bands.get(name, ())):
            axes.fill_between((step - 0.5, step + 0.5), start - 0.5, stop - 0.5, color="#e8e8e8", linewidth=0)
        for index, (label, path) in enumerate(paths.items()):
            points = [float("nan") if place is None else place for place in path]
            axes.plot(
                range(len(points)), points, label=label, color=COLOURS[index % 8], marker=MARKS[index % 8],
                linestyle=STYLES[index % 4], markersize=2.5, linewidth=0.9,
            )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(name, loc="left", fontsize=8, parse_math=False)
        axes.set_xlabel("step", fontsize=7)
        axes.set_ylabel("position of the largest sink (prompt starts at 0)", fontsize=7)
        axes.tick_params(labelsize=6)
        if paths:
            axes.legend(fontsize=6, frameon=False)
    return figure


def _draw(axes: Any, name: str, points: Sequence[tuple[float, Any]], colour: int, line: int) -> Any:
    positions = [float(position) for position, _ in points]
    centre = np.asarray([_centre(value) for _, value in points])
    bars = np.asarray([_ends(value) for _, value in points]).T
    kind: dict[str, Any] = {
        "color": COLOURS[colour % 8],
        "marker": MARKS[colour % 8],
        "linestyle": STYLES[line % 4],
    }
    if np.isfinite(bars).any():
        errors = np.clip(np.nan_to_num(np.stack([centre - bars[0], bars[1] - centre])), 0, None)
        return axes.errorbar(
            positions, centre, yerr=errors, label=name, capsize=2, markersize=4, linewidth=1, **kind
        )
    return axes.plot(positions, centre, label=name, markersize=3, linewidth=1, **kind)[0]


def _centre(value: Any) -> float:
    return float(getattr(value, "value", value))


def _ends(value: Any) -> tuple[float, float]:
    return float(getattr(value, "low", np.nan)), float(getattr(value, "high", np.nan))
