"""`score_distribution`: how many keys have which score (2510.15731, Figures 3 and 9)."""

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.printable import counted
from dlm_lens.recording import Recording
from dlm_lens.sinks import AboveMean, Detector, Received
from dlm_lens.sinks.detectors.base import as_detector
from dlm_lens.statistics import SHARE_BOUNDS, ratio_by_prompt
from dlm_lens.viz.figures.labels import LogShares, captioned, level_label, numbered
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received, index_of, level_of

POINTS = 200
DASHES = ("-", "--", "-.", ":")


@checked_arguments(parts=whole(least=1))
@own_colours()
def score_distribution(
    received: Received | Recording,
    *,
    layer: int | None = None,
    head: int | None = None,
    parts: int = 4,
    detector: Detector | str | None = None,
    title: str = "",
) -> Figure:
    """Share of keys whose score is at least x, on logarithmic axes, for early to late steps.

    After Figures 3 and 9 of 2510.15731, drawn as the tail of the distribution, which shows a share of one key in
    1,000. The scores are those of single heads: of all layers, of one layer, or of one head. Bands are 95%
    intervals (bootstrap over prompts; none for one). The grey line is the median threshold of the rule.

    Args:
        received: from `received_over_steps`, or a recording with ReceivedAttention.
        layer: index of the layer in the model; None for all layers.
        head: index of the head; None for all heads.
        parts: how many equal parts of the run to draw separately, at most 4.
        detector: the rule of the threshold; `AboveMean(3.0)`, Eq. 3, by default.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: an unknown layer or head, a number of parts out of range, or a rule that reads hidden states.
    """
    received, rule = as_received(received), AboveMean(3.0) if detector is None else as_detector(detector)
    level_of(layer, head)
    if not 1 <= parts <= len(DASHES):
        raise ValueError(f"parts is {parts}; it is 1 to {len(DASHES)}")
    received = _part(received, layer, head)
    groups = np.array_split(np.arange(len(received.values)), min(parts, len(received.values)))
    counts = _count(received, rule, groups)
    figure = NotebookFigure(figsize=(5.6, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for number, steps in enumerate(groups):
        colour = colormaps["viridis"](0.75 * number / max(1, len(groups) - 1))
        above, low, high = ratio_by_prompt(
            counts.above[:, number], counts.defined[:, number], received.row_prompts, bounds=SHARE_BOUNDS
        )
        first, last = (received.step_numbers[steps[end]] for end in (0, -1))
        label = f"steps {first} to {last}" if len(steps) > 1 else f"step {first}"
        shown = np.where(above > 0, above, np.nan)
        axes.plot(counts.x, shown, DASHES[number], color=colour, linewidth=1.6, label=label, gid="tail")
        # Where all keys or none have the score, the interval of so few prompts (32% of 8) says nothing of the tail.
        between = (above > 0) & (above < 1)
        axes.fill_between(counts.x, low, high, where=between, color=colour, alpha=0.2, linewidth=0)
    if np.isfinite(counts.threshold):
        axes.axvline(counts.threshold, color="0.45", linewidth=1.0, label=f"threshold of {rule}", gid="threshold")
    _name_axes(axes, counts.scale)
    shape = received.values.shape
    return captioned(
        figure,
        title,
        "Scores of all keys",
        f"scale: {counts.scale}",
        level_label("head", layer, head) if head is not None else _level(received),
        f"queries: {received.queries}",
        f"n = {int(counts.defined[..., 0].sum())} keys in {counted(shape[0], 'step')} of "
        f"{counted(int((counts.defined[..., 0] > 0).any(1).sum()), 'sequence')}",
        axes=axes,
    )


@plot(
    "score-distribution",
    "share of keys whose score is at least x (Figures 3, 9)",
    options=("layer", "head", "detector", "queries", "level"),
    needs="received",
)
def _draw(options: PlotOptions) -> Figure:
    layer, head = options.layer_and_head
    received = options.received.at_level(options.level)
    return score_distribution(received, layer=layer, head=head, detector=options.rule, title=options.name)


def _part(received: Received, layer: int | None, head: int | None) -> Received:
    """Received attention of one layer, one head, or all."""
    if layer is not None:
        place = index_of("layer", layer, received.layers)
        received = received.part(layers=slice(place, place + 1))
    if head is not None:
        received = received.at_level("head")  # refuses means over heads
        place = index_of("head", head, received.head_numbers)
        received = received.part(heads=slice(place, place + 1))
    return received


def _level(received: Received) -> str:
    """The level, with the layers and heads whose scores these are as far as they are known."""
    heads = numbered("head", received.heads) if received.heads else "all heads"
    named = [heads] if received.level == "head" else []
    named += [numbered("layer", received.layers)] if received.layers else []
    return ", ".join([f"level: {received.level}", *([" of ".join(named)] if named else [])])


def _name_axes(axes: Axes, scale: str) -> None:
    """Make both axes logarithmic, with plain numbers as labels."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda score, _: f"{score:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(LogShares())
    axes.yaxis.set_minor_formatter(LogShares())
    axes.set_ylim(top=1.4)
    axes.grid(color="0.9", linewidth=0.6)
    axes.tick_params(which="both", labelsize=7)
    axes.set_xlabel(f"score x ({scale})", fontsize=8)
    axes.set_ylabel("share of keys with a score of at least x", fontsize=8)
    axes.legend(fontsize=7, frameon=False)


@dataclass(frozen=True)
class _Counts:
    """Numbers of keys with a score of at least x, and of keys with any score: [sequence, part, x]."""

    x: NDArray[np.float64]
    above: NDArray[np.float64]
    defined: NDArray[np.float64]
    threshold: float
    scale: str


def _count(received: Received, rule: Detector, groups: list[NDArray[np.int64]]) -> _Counts:
    scores, scale = received.read(rule.quantity)
    defined_scores = scores[~scores.isnan()]
    if not len(defined_scores):
        raise ValueError("no key has a score; nothing to draw")
    if not bool((defined_scores > 0).any()):
        raise ValueError("no key has a score above 0, and the axes are logarithmic; nothing to draw")
    top, lowest = float(defined_scores.max()), float(defined_scores[defined_scores > 0].min())
    x = np.geomspace(max(lowest, top * 1e-4), top, POINTS)
    above = np.zeros((scores.shape[1], len(groups), POINTS))
    defined = np.zeros_like(above)
    thresholds = []
    for row in range(scores.shape[1]):
        for number, steps in enumerate(groups):
            values = scores[torch.as_tensor(steps), row]
            ordered = values[~values.isnan()].double().sort().values.numpy()
            above[row, number] = len(ordered) - np.searchsorted(ordered, x * (1 - 1e-9))
            defined[row, number] = len(ordered)
            thresholds.append(rule.thresholds(values).flatten())
    limits = torch.cat(thresholds)
    limits = limits[limits.isfinite()]
    return _Counts(x, above, defined, float(limits.median()) if len(limits) else float("nan"), scale)
