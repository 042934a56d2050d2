"""`value_norm_scatter` and `value_norm_layers`: Figures 1 and 3 of "One Token Is Enough" (2601.19657)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.probes import ValueNorms, value_norms
from dlm_lens.viz.figures.labels import PLAIN, captioned, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot

SINKS, OTHERS = "#b2182b", "#2166ac"
MOST_POINTS = 4000


@checked_arguments()
@own_colours()
def value_norm_scatter(norms: ValueNorms, *, title: str = "") -> Figure:
    """Value norms of sinks and of matched other tokens, with their means.

    After the scatter plots of Figure 1 of 2601.19657. Left: the sampled pairs, of more than 4,000 the first, which
    are in random order, with random horizontal offsets.
    Right: histograms of the norms. The bar is the mean, the box its 95% interval (bootstrap over prompts).

    Args:
        norms: from `value_norms`.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: not a `ValueNorms`.
    """
    _check(norms)
    figure = NotebookFigure(figsize=(6.8, 3.9), layout="constrained")
    points, counts = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    _draw_points(points, norms)
    table = norms.distribution(bins=24)
    edges = np.append(table["low"].to_numpy(), table["high"].iloc[-1])
    for name, colour, dashes in (("sinks", SINKS, "-"), ("others", OTHERS, "--")):
        share = table[name] / max(1, table[name].sum())
        counts.stairs(
            share, edges, orientation="horizontal", color=colour, linestyle=dashes, label=name, linewidth=1.4
        )
    points.set_xlim(-0.5, 1.5)
    points.set_ylim(0, 1.06 * points.get_ylim()[1])  # with room for the label over the highest box
    points.set_xticks([0, 1], ["sinks", "matched others"], fontsize=8)
    points.set_ylabel(f"norm {_drawn_formula(norms).split(' (')[0]}", fontsize=8, **PLAIN)
    counts.set_xlabel("share of tokens", fontsize=8)
    counts.xaxis.set_major_locator(MaxNLocator(4))  # a narrow panel
    counts.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    counts.legend(fontsize=7, frameon=False)
    for axes in (points, counts):
        axes.tick_params(labelsize=7)
    prompts = len(set(norms.prompt.tolist()))
    return captioned(
        figure,
        title,
        f"Value norms, {_drawn_formula(norms)}",
        f"sinks: {norms.rule}",
        "others: same prompt, step, layer and head" + (", same state" * (norms.match == "masked")),
        f"ratio {norms.ratio.value:.2f}" + _interval(norms.ratio.low, norms.ratio.high),
        f"n = {counted(len(norms.sink), 'pair')} of {counted(norms.found, 'sink')}, {counted(prompts, 'prompt')}",
    )


@checked_arguments()
@own_colours()
def value_norm_layers(norms: ValueNorms, *, title: str = "") -> Figure:
    """Mean value norm of sinks and of others per layer, and the share of attention that the sinks receive.

    After Figure 3 of 2601.19657. Bands are 95% intervals (bootstrap over prompts; none for one).

    Args:
        norms: from `value_norms`.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: not a `ValueNorms`.
    """
    _check(norms)
    profile = norms.profile
    shares = "share" in profile
    figure = NotebookFigure(figsize=(7.6 if shares else 4.2, 3.5), layout="constrained")
    panels = list(figure.subplots(1, 2 if shares else 1, squeeze=False).flat)
    lines = [(panels[0], "norm_sink", "sinks", SINKS, "o-"), (panels[0], "norm_other", "others", OTHERS, "^--")]
    lines += [(panels[1], "share", "sinks", SINKS, "o-")] if shares else []
    for axes, name, label, colour, style in lines:
        layer = profile["layer"].to_numpy()
        axes.plot(layer, profile[name], style, color=colour, markersize=4, linewidth=1.4, label=label, gid=name)
        low, high = profile[f"{name}_low"], profile[f"{name}_high"]
        if name == "share":
            # As in score_distribution: no interval of a few prompts where no key is a sink.
            low, high = (ends.where(profile["sinks"] > 0) for ends in (low, high))
        draw_band(axes, layer, low, high, colour=colour)
    panels[0].set_ylabel("mean value norm", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False)
    if shares:
        panels[1].set_ylabel("attention received by the sinks", fontsize=8)
        panels[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer", fontsize=8)
        whole_ticks(axes.xaxis)
        axes.tick_params(labelsize=7)
        axes.grid(color="0.92", linewidth=0.6)
    return captioned(
        figure,
        title,
        f"Value norms per layer, {_drawn_formula(norms)}",
        f"sinks: {norms.rule}",
        "scale of the right: share of the attention of all queries" if shares else "",
        f"n = {counted(norms.found, 'sink')}, {counted(norms.mean_sink.prompts, 'prompt')}, all steps",
    )


@plot(
    "value-norm-scatter",
    "value norms of sinks and of matched other tokens (2601.19657, Figure 1)",
    options=("detector", "queries", "level"),
    needs="value_norm",
)
def _draw_scatter(options: PlotOptions) -> Figure:
    return value_norm_scatter(_norms_of(options), title=options.name)


@plot(
    "value-norm-layers",
    "value norms and received attention per layer (2601.19657, Figure 3)",
    options=("detector", "queries", "level"),
    needs="value_norm",
)
def _draw_layers(options: PlotOptions) -> Figure:
    return value_norm_layers(_norms_of(options), title=options.name)


def _norms_of(options: PlotOptions) -> ValueNorms:
    return value_norms(options.recording, options.sinks())


def _draw_points(points: Axes, norms: ValueNorms) -> None:
    """Draw every pair with a random horizontal offset, and the means with their intervals."""
    spread = np.random.default_rng(norms.seed)
    groups = (
        ("sinks", norms.sink, norms.mean_sink, SINKS, "o"),
        ("others", norms.other, norms.mean_other, OTHERS, "^"),
    )
    for place, (name, values, mean, colour, marker) in enumerate(groups):
        drawn = values[:MOST_POINTS].numpy()
        sideways = place + spread.uniform(-0.32, 0.32, len(drawn))
        points.scatter(
            sideways,
            drawn,
            s=5 if len(drawn) > 500 else 16,
            marker=marker,
            c=colour,
            alpha=0.25 if len(drawn) > 500 else 0.7,
            linewidths=0,
            gid=name,
            rasterized=True,
        )
        points.plot([place - 0.42, place + 0.42], [mean.value] * 2, color="black", linewidth=1.8, zorder=4)
        points.fill_between(
            [place - 0.42, place + 0.42],
            mean.low,
            mean.high,
            facecolor="0.6",
            edgecolor="black",
            alpha=0.5,
            zorder=3,
        )
        top = mean.high if np.isfinite(mean.high) else mean.value
        points.annotate(
            f"mean {mean.value:.2f}", (place + 0.42, top), (0, 3), textcoords="offset points", ha="right",
            va="bottom", fontsize=7, zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8},
        )  # fmt: skip


def _drawn_formula(norms: ValueNorms) -> str:
    """The formula of the norm with the signs of mathematics that a figure's font has."""
    return norms.formula.replace("||v_j^m||_2", "‖vⱼᵐ‖₂").replace("sum_m", "Σₘ")


def _check(norms: ValueNorms) -> None:
    if not isinstance(norms, ValueNorms):
        raise TypeError(f"the first argument is a {type(norms).__name__}; give the ValueNorms of value_norms")


def _interval(low: float, high: float) -> str:
    return f" ({low:.2f} to {high:.2f})" if np.isfinite(low) else ""
