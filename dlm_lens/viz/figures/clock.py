"""`clock_scores`: how well denoising time is read from every layer, and what is read at each time (2607.01774)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.probes import DenoisingClock, denoising_clock
from dlm_lens.viz.figures.labels import PLAIN, captioned, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot

LINES = {"open": ("#0072b2", "o-"), "written": ("#d55e00", "s--"), "prompt": ("#009e73", "^-.")}
NULL = "0.45"


@checked_arguments()
@own_colours()
def clock_scores(clock: DenoisingClock, *, untrained: DenoisingClock | None = None, title: str = "") -> Figure:
    """R^2 of the time read from every layer on held-out prompts, and the time read over the true one.

    Left: one line per class of positions, -1 for the token embeddings; grey the largest R^2 of probes fitted to
    permuted labels. Right: the mean time read in each class's best layer. Bands and bars are 95% intervals
    (bootstrap over the held-out prompts).

    Args:
        clock: from `denoising_clock`.
        untrained: a clock of the same runs read from the model's `untrained_twin`, drawn as thin dotted lines.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: not a `DenoisingClock`.
        ValueError: clocks of different layers.
    """
    for one in (clock, untrained):
        if not isinstance(one, DenoisingClock | None) or clock is None:
            raise TypeError(
                f"clock_scores takes a {type(one).__name__}; give the DenoisingClock of denoising_clock"
            )
    if untrained is not None and untrained.layers != clock.layers:
        raise ValueError(f"the clocks have the layers {clock.layers} and {untrained.layers}; fit both to the same")
    figure = NotebookFigure(figsize=(7.6, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    names = [name for name in clock.classes if bool(clock.reading.count[clock.reading.kind_index(name)].any())]
    for name in names:
        _draw_layers(left, clock, name, untrained)
        _draw_readings(right, clock, name)
    left.plot([], [], color=NULL, linewidth=1, label="permuted labels (largest)")
    if untrained is not None:
        left.plot([], [], color="black", linewidth=0.8, linestyle=":", label="untrained twin")
    left.set_ylim(max(-0.25, min(-0.05, left.get_ylim()[0])), 1.03)  # a null of few prompts may be far below 0
    below = bool(_lowest(clock, names) < left.get_ylim()[0])
    left.set_xlabel("layer (-1: token embeddings)", fontsize=8)
    left.set_ylabel(f"R² of {_target(clock)}", fontsize=8, **PLAIN)
    whole_ticks(left.xaxis)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=5, fontsize=7, frameon=False)
    right.plot([0, 1], [0, 1], color="0.7", linewidth=0.8, zorder=0)
    right.set_xlabel(f"true {_target(clock)}", fontsize=8)
    right.set_ylabel("read, mean over positions", fontsize=8)
    right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.grid(color="0.92", linewidth=0.6)
    # Rows of equal prompts are one, as in the intervals.
    prompts = len(clock.reading.prompt[(clock.reading.count > 0).any(1).any(0)].unique())
    return captioned(
        figure,
        title,
        f"A linear probe of {_target(clock)}",
        f"fitted to {counted(clock.prompts, 'prompt')}, n = {prompts} others scored",
        "every position is a case",
        f"bands: 95% intervals, cut off at the bottom (the lowest begins at {_lowest(clock, names):.2g})" * below,
    )


@plot(
    "clock-scores",
    "denoising time read from every layer, held-out prompts (2607.01774); runs the model",
    options=("model",),
)
def _draw(options: PlotOptions) -> Figure:
    return clock_scores(denoising_clock(options.network, options.run), title=options.name)


def _lowest(clock: DenoisingClock, names: Sequence[str]) -> float:
    """The lowest end of an interval; infinite where there is none."""
    ends = [clock.reading.r2(name, layer).low for name in names for layer in clock.layers]
    return min((low for low in ends if np.isfinite(low)), default=np.inf)


def _target(clock: DenoisingClock) -> str:
    return "t / T" if clock.target == "time" else "the decided share"


def _draw_layers(axes: Axes, clock: DenoisingClock, name: str, untrained: DenoisingClock | None) -> None:
    colour, style = LINES[name]
    found = [clock.reading.r2(name, layer) for layer in clock.layers]
    layers = list(clock.layers)
    axes.plot(
        layers, [one.value for one in found], style, color=colour, markersize=4, linewidth=1.4, label=name, gid=name
    )
    low, high = ([getattr(one, end) for one in found] for end in ("low", "high"))
    draw_band(axes, layers, low, high, colour=colour, alpha=0.18)
    null = [max(clock.reading.null(name, layer), default=np.nan) for layer in layers]
    axes.plot(layers, null, color=NULL, linewidth=1, gid=f"{name} null")
    if untrained is not None:
        twin = [untrained.reading.r2(name, layer).value for layer in layers]
        axes.plot(layers, twin, ":", color=colour, linewidth=1, gid=f"{name} untrained")


def _draw_readings(axes: Axes, clock: DenoisingClock, name: str) -> None:
    colour, style = LINES[name]
    best = clock.best_layer(name)
    table = clock.reading.by_label(name, best)
    read = table["read"].to_numpy()
    bars = np.clip(np.stack([read - table["read_low"], table["read_high"] - read]), 0, None)
    axes.errorbar(
        table["label"], read, yerr=bars, fmt=style, color=colour, markersize=3, linewidth=1.1, capsize=2,
        label=f"{name}, layer {best}",
    )  # fmt: skip
