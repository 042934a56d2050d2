"""`sink_positions`: Figure 7 of 2510.15731, where the largest sink is at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from dlm_lens.sinks import AboveMean, Detector, Level, Received, Sinks, find_sinks
from dlm_lens.viz.choice import choose, index_of, level_of
from dlm_lens.viz.labels import PLAIN, WRITTEN_LATER, caption, counted_keys, level_label, token_labels

SINK, LARGEST, MASKED, BLOCK = "#b2182b", "#7f7f7f", "#d3e3f0", "#4d4d4d"


def sink_positions(
    sinks: Received | Sinks,
    detector: Detector | None = None,
    *,
    layer: int | None,
    head: int | None,
    row: int = 0,
    blocks: Sequence[tuple[int, int]] | None = None,
    title: str = "",
) -> Figure:
    """Position of the key that receives most, at every step: filled where it is a sink, hollow where it is not.

    After Figure 7 of 2510.15731. Shaded cells are masked at that step. The tokens of the positions that hold
    the largest sink at some step stand on the right, as they are in the end.

    Args:
        sinks: from `received_over_steps`, or from `find_sinks` with a step axis.
        detector: the rule for a `Received`; `AboveMean(3.0)`, Eq. 3, by default.
        layer: index of the layer in the model; None for the mean over layers and heads.
        head: index of the head; None for the mean over heads.
        row: which sequence of the batch.
        blocks: the block being decoded at each step as (start, stop), `Denoised.spans`, to draw the borders.
        title: what stands in front of the caption, such as the model's name.

    Raises:
        TypeError: neither a `Received` nor `Sinks`, or a detector beside `Sinks`.
        ValueError: a layer, head or row that is not there, another level, or not one block per step.
    """
    if isinstance(sinks, Sinks):
        if detector is not None:
            raise TypeError(f"these Sinks were found by {sinks.detector}; a detector goes with a Received")
        track = _track_of(sinks, layer, head, row)
    else:
        shown = choose(sinks, layer, head, row)
        rule = AboveMean(3.0) if detector is None else detector
        found = find_sinks(shown.received, rule, level=shown.level)
        track = _track(found, {}, shown.content.tolist(), shown.final)
    steps, positions = len(track.largest), len(track.content)
    if blocks is not None and len(blocks) != steps:
        raise ValueError(f"{len(blocks)} blocks for {steps} steps; give one (start, stop) per step, run.spans")
    width, height = min(14.0, max(6.0, 0.09 * steps + 2.5)), min(10.0, max(3.4, 0.055 * positions + 1.6))
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    _shade_masked(axes, track)
    _draw_blocks(axes, blocks or ())
    _draw_marks(axes, track)
    _name_axes(figure, axes, track)
    _explain(figure, masked=track.masked is not None, blocks=bool(blocks))
    sentences = [
        *([title] if title else []),
        "Position that receives most",
        f"rule: {track.rule}",
        level_label(track.level, layer, head),
        f"{counted_keys(positions, track.sinks)}, {steps} steps, n = 1 sequence (row {row})",
        f"sink in {sum(track.passes)} of {steps} steps",
    ]
    axes.set_title(caption(sentences, width), loc="left", fontsize=8, **PLAIN)
    return figure


@dataclass(frozen=True)
class _Track:
    """What the picture shows of one pattern: per step the largest key (-1: none defined) and if it passes."""

    largest: list[int]
    passes: list[bool]
    masked: Bool[Tensor, "step key"] | None
    content: list[int]
    tokens: list[int] | None
    tokenizer: Any
    rule: str
    level: Level
    sinks: int


def _track_of(sinks: Sinks, layer: int | None, head: int | None, row: int) -> _Track:
    """One layer, head and row of Sinks."""
    if not isinstance(sinks, Sinks) or "step" not in sinks.dims:
        raise TypeError(f"{sinks!r} has no steps to follow; give a Received or Sinks with a step axis")
    if level_of(layer, head) != sinks.level:
        raise ValueError(
            f"these Sinks are of level {sinks.level!r}, but layer={layer}, head={head} asks for "
            f"{level_of(layer, head)!r}; find_sinks again with level="
        )
    sizes = dict(zip(sinks.dims, sinks.is_sink.shape, strict=True))
    wanted: dict[str, tuple[int | None, Sequence[int]]] = {
        "batch": (row, range(sizes.get("batch", 1))),
        "layer": (layer, sinks.layers),
        "head": (head, range(sizes.get("head", 1))),
    }
    place = {n: index_of(n, i, there) for n, (i, there) in wanted.items() if n in sizes and i is not None}
    there = (~_at(sinks.scores, sinks.dims, place).isnan()).any(0)
    if sinks.masked is not None:
        there = there | _at(sinks.masked, _rows(sinks), place).any(0)
    tokens = None if sinks.tokens is None else _at(sinks.tokens, _rows(sinks), place)[-1].tolist()
    return _track(sinks, place, there.nonzero().flatten().tolist(), tokens)


def _track(sinks: Sinks, place: dict[str, int], content: list[int], tokens: list[int] | None) -> _Track:
    scores = _at(sinks.scores, sinks.dims, place)
    is_sink = _at(sinks.is_sink, sinks.dims, place)
    largest = scores.nan_to_num(nan=-torch.inf).argmax(-1)
    passes = is_sink.gather(-1, largest[:, None]).squeeze(-1)
    return _Track(
        largest=largest.masked_fill(scores.isnan().all(-1), -1).tolist(),
        passes=passes.tolist(),
        masked=None if sinks.masked is None else _at(sinks.masked, _rows(sinks), place),
        content=content,
        tokens=tokens,
        tokenizer=sinks.tokenizer,
        rule=f"{sinks.detector}; scale: {sinks.scale}; queries: {sinks.queries}",
        level=sinks.level,
        sinks=sinks.sinks,
    )


def _rows(sinks: Sinks) -> tuple[str, ...]:
    return tuple(name for name in sinks.dims if name not in ("layer", "head"))


def _at(tensor: Tensor, dims: Sequence[str], place: dict[str, int]) -> Tensor:
    """[step, key] of a tensor with more axes."""
    return tensor[tuple(slice(None) if name in ("step", "key") else place.get(name, 0) for name in dims)]


def _shade_masked(axes: Axes, track: _Track) -> None:
    if track.masked is None:
        return
    steps, keys = track.masked.shape
    axes.pcolormesh(
        torch.arange(steps + 1).numpy() - 0.5,
        torch.arange(keys + 1).numpy() - 0.5,
        track.masked.T.numpy().astype(float),
        cmap=ListedColormap(["white", MASKED]),
        vmin=0,
        vmax=1,
        zorder=0,
    )


def _draw_blocks(axes: Axes, blocks: Sequence[tuple[int, int]]) -> None:
    """Outline every block over the steps at which it is decoded."""
    first = 0
    for step in range(1, len(blocks) + 1):
        if step == len(blocks) or blocks[step] != blocks[first]:
            start, stop = blocks[first]
            corner = (first - 0.5, start - 0.5)
            axes.add_patch(
                Rectangle(
                    corner, step - first, stop - start, fill=False, edgecolor=BLOCK, linestyle="--", linewidth=0.8
                )
            )
            first = step


def _draw_marks(axes: Axes, track: _Track) -> None:
    steps = range(len(track.largest))
    sinks = [t for t in steps if track.passes[t]]
    others = [t for t in steps if track.largest[t] >= 0 and not track.passes[t]]
    for name, chosen, face, edge in (("sink", sinks, SINK, SINK), ("largest", others, "white", LARGEST)):
        places = [track.largest[t] for t in chosen]
        axes.scatter(chosen, places, s=16, linewidths=0.9, zorder=3, facecolors=face, edgecolors=edge, gid=name)


def _name_axes(figure: Figure, axes: Axes, track: _Track) -> None:
    axes.set_xlim(-0.5, len(track.largest) - 0.5)
    low, high = (min(track.content), max(track.content)) if track.content else (0, 0)
    if track.sinks:
        # Behind the canvas, a row of its own for every learned sink token.
        axes.axhline(high + 0.5 - track.sinks, color="black", linewidth=1.2, gid="sinks")
    axes.set_ylim(low - 0.8, high + 0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=7)
    axes.set_xlabel("step", fontsize=8)
    learned = "; above the line: learned sink" if track.sinks else ""
    axes.set_ylabel(f"canvas position{learned}", fontsize=8)
    if track.tokens is not None:
        _name_tokens(axes, track, spacing=(high - low + 2) / (figure.get_size_inches()[1] * 7))


def _explain(figure: Figure, *, masked: bool, blocks: bool) -> None:
    """Legend of the marks that can occur."""
    handles: list[Artist] = [
        Line2D([], [], linestyle="", marker="o", markersize=4, color=SINK, label="largest, a sink by the rule"),
        Line2D(
            [], [], linestyle="", marker="o", markersize=4, color=LARGEST, mfc="white", label="largest, no sink"
        ),
    ]
    if masked:
        handles.append(Patch(facecolor=MASKED, label=WRITTEN_LATER))
    if blocks:
        handles.append(Patch(facecolor="none", edgecolor=BLOCK, linestyle="--", label="block being decoded"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=7, frameon=False)


def _name_tokens(axes: Axes, track: _Track, spacing: float) -> None:
    """Tokens on the right, at their positions; those too close for lines of their own share one."""
    assert track.tokens is not None
    lines: dict[int, list[int]] = {}
    first = -1
    for position in sorted({p for p in track.largest if p >= 0}):
        if not lines or position - first >= spacing:
            first = position
        lines.setdefault(first, []).append(track.tokens[position])
    texts = []
    for tokens in lines.values():
        shown = token_labels(tokens[:3], track.tokenizer) + ["…"] * (len(tokens) > 3)
        texts.append(", ".join(shown))
    right = axes.secondary_yaxis("right")
    right.set_yticks(list(lines), texts, fontsize=6.5, **PLAIN)
    right.tick_params(length=2)
