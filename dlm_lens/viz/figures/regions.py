"""`region_mass`: attention on regions of keys over the steps (2510.15731, sections 5.1 and 5.3)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dlm_lens.arguments import WORDS, checked_arguments
from dlm_lens.printable import counted, shown
from dlm_lens.recording import KEY_REGIONS, QUERY_CLASSES, QueryClass, Recording
from dlm_lens.recording.query_classes import OTHER_NAMES, checked_class
from dlm_lens.recording.recording import as_recording
from dlm_lens.statistics import SHARE_BOUNDS, ratio_by_prompt
from dlm_lens.viz.figures.labels import captioned, note, numbered, region_words, whole_ticks
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_band, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import index_of, level_of

QUERY_STYLES: dict[str, tuple[str, Any, str]] = {
    "all": ("black", "-", "o"),
    "masked": ("#2166ac", "--", "s"),
    "unmasked": ("#b2182b", "-.", "^"),
    "prompt": ("#7f7f7f", ":", "D"),
    "block": ("#e08214", (0, (5, 1, 1, 1, 1, 1)), "v"),
}
"""Colour, dashes, and mark of a single step, of a class of queries, which differ in black and white too."""

EMPTY = 1e-6
"""A panel whose largest share of attention is below this has a note that there is nothing, and no band."""

NEARLY_EMPTY = 0.001
"""A panel whose largest share of attention is below this has a note with the share."""


@checked_arguments(queries=WORDS)
@own_colours()
def region_mass(
    recording: Recording,
    *,
    queries: tuple[QueryClass, ...] = ("masked", "unmasked"),
    layer: int | None = None,
    head: int | None = None,
    title: str = "",
) -> Figure:
    """Share of its attention that a query of each class puts on each region of keys, over the steps.

    One panel per region of keys. Prompt, masked, unmasked and block are sets of positions that may overlap; sink is
    the set that `RegionMass(sinks=...)` defines; self, past and future are relative to the query. Lines are means
    over the recorded layers and heads, and over sequences, bands 95% intervals (bootstrap over prompts; none for
    one). The thin grey line is the share under uniform attention, for regions where it does not depend on the
    pattern. A line breaks where a sequence ends (dotted lines) or has no queries of the class left, since the mean
    is over other sequences from there on. A panel without attention has a note.

    Args:
        recording: with `RegionMass`.
        queries: which classes of queries to draw.
        layer: index of the layer; None for the mean over layers.
        head: index of the head; None for the mean over heads.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: not a `Recording`.
        ValueError: a recording without RegionMass; an unknown class, layer or head.
    """
    recording = as_recording(recording)
    if "region_mass" not in recording.specs:
        raise ValueError(
            f"this recording has no region_mass; record with RegionMass(), it has {', '.join(recording.specs)}"
        )
    if not queries or not set(queries) <= {*QUERY_CLASSES, *OTHER_NAMES}:
        raise ValueError(f"queries is {shown(queries)}; give some of {', '.join((*QUERY_CLASSES, *OTHER_NAMES))}")
    queries = tuple(checked_class(name, "region_mass") for name in queries)
    words = region_words(recording.run)
    mass = _chosen(recording, layer, head)
    even, ends = _even(recording), _ends(recording)
    figure = NotebookFigure(figsize=(9.6, 4.9), layout="constrained")
    panels = list(figure.subplots(2, 4, sharex=True).flat)
    chosen = [QUERY_CLASSES.index(name) for name in queries]
    for number, (axes, region) in enumerate(zip(panels, KEY_REGIONS, strict=True)):
        if region in even:
            x, share = _broken(recording.run.running.T.numpy(), recording.steps, even[region])
            axes.plot(
                x, share, color="0.55", linewidth=0.9, label="uniform attention", gid="even", **_alone(share, "_")
            )
        for name in queries:
            values = mass[..., QUERY_CLASSES.index(name), number]
            _line(axes, recording, values, name, words.get(name, name))
        _finish_panel(axes, recording, mass[..., chosen, number], region, words, ends)
        if region == "sink" and _learned_alone(recording) and not recording.sinks:
            axes.set_yticks([])  # no shares to read off
    for axes in panels[4:]:
        axes.set_xlabel("step", fontsize=8)
    named = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=6, fontsize=7, frameon=False)
    return captioned(figure, title, *_sentences(recording, mass, queries, layer, head, words))


def _finish_panel(
    axes: Axes,
    recording: Recording,
    mass: Float[Tensor, "step batch query_region"],
    region: str,
    words: Mapping[str, str],
    ends: Sequence[float],
) -> None:
    """Title, limits and ticks of a region's panel, and where sequences end."""
    axes.set_title(f"on {words.get(region, region)}", fontsize=8)
    # The top is a little above the highest line, and never as low as rounding errors.
    axes.set_ylim(0, max(1.06 * axes.dataLim.y1, 0.001))
    _note_if_empty(axes, recording, mass, region)
    for step in ends:
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":", label="a sequence ends", gid="ends")
    whole_ticks(axes.xaxis, 5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.tick_params(labelsize=7)
    axes.grid(color="0.92", linewidth=0.6)


def _sentences(
    recording: Recording,
    mass: Float[Tensor, "step batch query_region key_region"],
    queries: Sequence[str],
    layer: int | None,
    head: int | None,
    words: Mapping[str, str],
) -> list[str]:
    """The caption: scale, level, rule, n, and the classes that have no queries."""
    where = numbered("layer", recording.layers if layer is None else [layer])
    heads = numbered("head", recording.heads) if recording.heads else "the heads"
    there = mass[..., [QUERY_CLASSES.index(name) for name in queries], :].isfinite().any(-1).any(-1).any(0)
    rows, left = int(there.sum()), int((there & (recording.run.row_steps == len(recording.steps))).sum())
    absent = [
        words.get(name, name)
        for name in queries
        if not bool(mass[..., QUERY_CLASSES.index(name), :].isfinite().any())
    ]
    spec = recording.specs["region_mass"]
    return [
        "Attention by region of keys",
        "scale: share of a query's attention",
        f"level: head (layer {layer}, head {head})" if head is not None else f"mean over {heads} of {where}",
        f"sinks: {'learned sink tokens alone' if _learned_alone(recording) else spec.reducer}",
        *([f"there are no {' and no '.join(absent)} queries"] if absent else []),
        f"n = {counted(rows, 'sequence')}{f' ({left} to the end)' if _ends(recording) else ''}, "
        f"{counted(len(recording.steps), 'step')}",
    ]


@plot(
    "region-mass",
    "attention by region of keys over the steps",
    options=("layer", "head"),
    needs="region_mass",
)
def _draw(options: PlotOptions) -> Figure:
    layer, head = options.layer_and_head
    return region_mass(options.recording, layer=layer, head=head, title=options.name)


def _chosen(
    recording: Recording, layer: int | None, head: int | None
) -> Float[Tensor, "step batch query_region key_region"]:
    """The mass of one layer and head, or the mean over layers and heads."""
    level_of(layer, head)
    mass: Tensor = recording.region_mass.double()
    if layer is not None:
        place = index_of("layer", layer, recording.layers)
        mass = mass[:, :, place : place + 1]
    if head is not None:
        place = index_of("head", head, recording.heads or range(mass.shape[3]))
        mass = mass[:, :, :, place : place + 1]
    return mass.nanmean((2, 3))


def _line(axes: Axes, recording: Recording, mass: Float[Tensor, "step batch"], name: str, word: str) -> None:
    """Draw the mean over the sequences in which the class has queries, with its interval; `word` is its name."""
    values = mass.T.numpy()
    there = np.isfinite(values)
    mean, low, high = ratio_by_prompt(
        np.where(there, values, 0.0), there.astype(float), recording.run.row_prompts, bounds=SHARE_BOUNDS
    )
    colour, dashes, mark = QUERY_STYLES[name]
    x, mean, low, high = _broken(there, recording.steps, mean, low, high)
    label = f"{word} queries" if there.any() else None
    axes.plot(x, mean, linestyle=dashes, color=colour, linewidth=1.4, label=label, gid=name, **_alone(mean, mark))
    # Where there are no keys of the region, no other sequence would have any: a band up to the bound of so few
    # sequences (66% of two) would say that the share may be large.
    if np.where(there, values, 0.0).max() >= EMPTY:
        draw_band(axes, x, low, high, colour=colour, alpha=0.15)


def _broken(there: Bool[np.ndarray, "sequence step"], *lines: ArrayLike) -> list[NDArray[np.float64]]:
    """Lines over the steps with NaN where the mean is over other sequences from there on.

    Args:
        there: which sequences count at each step: one ends, or has no queries of a class left.
        *lines: the steps, and numbers of every step.
    """
    breaks = np.flatnonzero((there[:, 1:] != there[:, :-1]).any(0)) + 1
    return [np.insert(np.asarray(line, dtype=float), breaks, np.nan) for line in lines]


def _alone(values: NDArray[np.float64], mark: str) -> dict[str, Any]:
    """The style of a line that shows a step between breaks as a mark, since a line has none of it."""
    known = np.pad(np.isfinite(values), 1)
    alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:]).tolist()
    return {"marker": mark, "markersize": 9 if mark == "_" else 3.5, "markevery": alone} if alone else {}


def _nothing(recording: Recording, region: str) -> str:
    """Why a panel has nothing to show."""
    if region == "sink" and _learned_alone(recording) and not recording.sinks:
        return "no learned sink tokens\nin this model"
    return f"nothing on {region}"


def _note_if_empty(
    axes: Axes, recording: Recording, mass: Float[Tensor, "step batch query_region"], region: str
) -> None:
    """Write a note into a panel without queries, or with hardly any attention."""
    known = mass[mass.isfinite()]
    if not len(known):
        note(axes, "no queries")
    elif float(known.max()) < EMPTY:
        note(axes, _nothing(recording, region))
    elif float(known.max()) < NEARLY_EMPTY:
        note(axes, f"at most {float(known.max()):.1g} of the attention")


def _ends(recording: Recording) -> list[float]:
    """Where sequences end before the last step: halfway between two steps, in the coordinates of the axis."""
    counts = sorted(set(recording.run.row_steps.tolist()) - {len(recording.steps), 0})
    return [(recording.steps[count - 1] + recording.steps[count]) / 2 for count in counts]


def _learned_alone(recording: Recording) -> bool:
    """Whether the sink region is the learned sink tokens alone, without a detector."""
    return "sinks=None" in recording.specs["region_mass"].reducer


def _even(recording: Recording) -> dict[str, NDArray[np.float64]]:
    """The share of each region under uniform attention, mean over sequences.

    Empty where not every query sees the same keys: causal and block causal attention, also with observed tokens
    first, and sliding windows.
    """
    facts = recording.facts_of(recording.layers[0])
    if recording.causal or recording.windows or facts.blocks is not None or facts.observed_first:
        return {}
    valid = facts.valid
    keys = (facts.visible.sum(-1) + recording.sinks).clamp(min=1)  # padding too, where the network attends to it
    regions = {
        "prompt": facts.prompt,
        "masked": facts.masked & valid,
        "unmasked": ~facts.masked & valid,
        "block": facts.block & valid,
    }
    shares = {name: region.sum(-1) / keys for name, region in regions.items()}
    shares["self"] = 1 / keys
    if _learned_alone(recording):
        shares["sink"] = torch.full_like(keys, recording.sinks) / keys
    return {
        name: share.double().masked_fill(~recording.run.running, torch.nan).nanmean(-1).numpy()
        for name, share in shares.items()
    }
