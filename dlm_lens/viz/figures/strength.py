"""`sink_strength`: the main sink's score in every layer and head (2510.15731, Figure 5)."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.recording import Recording
from dlm_lens.sinks import Detector, Received, SinkProfile, sink_profile
from dlm_lens.sinks.detectors.base import as_detector
from dlm_lens.viz.figures.labels import PLAIN, captioned, note
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received

UNDEFINED = "#d9d9d9"


@checked_arguments()
@own_colours()
def sink_strength(
    sinks: SinkProfile | Received | Recording, detector: Detector | str | None = None, *, title: str = ""
) -> Figure:
    """Score of the main sink per layer (down) and head (across), mean over steps, and sinks per layer.

    After Figure 5 of 2510.15731. The cells of a small model hold their numbers. The lines on the right are means
    over steps and sequences: sinks in the pattern of one head, and positions that are a sink in any head.

    Args:
        sinks: from `sink_profile`, or a `Received` or recording.
        detector: the rule for a `Received` or a recording; `AboveMean(3.0)` by default.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: another type, or a detector with a profile.
        ValueError: scores without layer and head axes.
    """
    if isinstance(sinks, SinkProfile):
        if detector is not None:
            raise TypeError(f"this profile was made by {sinks.detector}; a detector goes with a Received")
        profile = sinks
    else:
        rule = None if detector is None else as_detector(detector)
        profile = sink_profile(as_received(sinks), rule)
    layers, heads = profile.score.shape
    width = min(13.0, max(6.4, 0.3 * heads + 4.2))
    figure = NotebookFigure(figsize=(width, min(10.0, max(3.0, 0.24 * layers + 1.6))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(max(1.5, 0.3 * heads / 2.2), 1))
    scores = profile.score.double().numpy()
    colours = colormaps["viridis"].with_extremes(bad=UNDEFINED)
    mesh = draw_cells(left, np.ma.masked_invalid(scores), cmap=colours, vmin=0)
    _write_numbers(left, scores)
    if not np.isfinite(scores).any():
        note(left, "no key has a score")
    left.invert_yaxis()
    skip_layers, skip_heads = -(-layers // 32), -(-heads // 32)
    shown = range(0, layers, skip_layers)
    left.set_yticks([i + 0.5 for i in shown], [str(profile.layers[i]) for i in shown], fontsize=7)
    left.set_xticks(
        [i + 0.5 for i in range(0, heads, skip_heads)], list(map(str, profile.heads[::skip_heads])), fontsize=7
    )
    left.set_xlabel("head", fontsize=8)
    left.set_ylabel("layer", fontsize=8)
    bar = figure.colorbar(mesh, ax=left, pad=0.01, fraction=0.05)
    bar.ax.tick_params(labelsize=7)
    whose = "each head's main sink" if profile.main == "head" else "the model's main sink"
    bar.set_label(f"score of {whose}\n({profile.scale})", fontsize=8, **PLAIN)
    _draw_counts(right, profile)
    return captioned(
        figure,
        title,
        "Main sink per layer and head",
        f"scale: {profile.scale}",
        f"level: head, {whose}",
        f"queries: {profile.queries}",
        f"rule of the counts: {profile.detector}",
        f"mean over n = {counted(profile.steps, 'step')} of {counted(profile.sequences, 'sequence')}",
    )


@plot(
    "sink-strength",
    "the main sink's score per layer and head (Figure 5)",
    options=("detector", "queries"),
    needs="received",
)
def _draw(options: PlotOptions) -> Figure:
    return sink_strength(options.received, options.rule, title=options.name)


def _write_numbers(axes: Axes, scores: np.ndarray) -> None:
    # Numbers of more heads would overlap.
    if scores.size > 64 or scores.shape[1] > 32 or not np.isfinite(scores).any():
        return
    top = np.nanmax(scores)
    for (layer, head), score in np.ndenumerate(scores):
        if np.isfinite(score):
            colour = "black" if score > 0.6 * top else "white"
            axes.text(head + 0.5, layer + 0.5, f"{score:.1f}", ha="center", va="center", fontsize=7, color=colour)


def _draw_counts(axes: Axes, profile: SinkProfile) -> None:
    places = np.arange(len(profile.layers)) + 0.5
    per_head = profile.sinks.nanmean(-1).numpy()
    axes.plot(
        per_head, places, "o-", color="black", markersize=3.5, linewidth=1.2, label="sinks per head", gid="per head"
    )
    axes.plot(
        profile.positions.numpy(), places, "s--", color="#b2182b", markersize=3.5, linewidth=1.2,
        label="positions, any head", gid="positions",
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(labelsize=7)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_xlabel("sinks (mean over steps)", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)
