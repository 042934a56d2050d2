"""`sink_positions`: where the largest sink is at every step (2510.15731, Figure 7), of one or several models."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from dlm_lens.arguments import Rule, checked_arguments, instance, is_whole
from dlm_lens.printable import counted, shown
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling.moved_tokens import NOWHERE
from dlm_lens.sinks import Detector, Received, Sinks, Trajectories
from dlm_lens.sinks.key_axes import Follow
from dlm_lens.viz.figures.labels import (
    PLAIN,
    caption,
    captioned,
    counted_keys,
    level_label,
    note,
    open_label,
    token_labels,
    whole_ticks,
)
from dlm_lens.viz.figures.notebook_figure import NotebookFigure, draw_cells, own_colours
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received, most_moving
from dlm_lens.viz.sink_tracks import Source, Track, revised_of, row_blocks, track_of, trajectories_of

MOST_MODELS = 6

SINK, LARGEST, MASKED, BLOCK, ABSENT = "#b2182b", "#7f7f7f", "#d3e3f0", "#4d4d4d", "#e8e8e8"


def _spans(value: Any) -> bool:
    return isinstance(value, Sequence) and all(len(span) == 2 and all(map(is_whole, span)) for span in value)


BY_NAME = instance(Mapping, "a dict by the names of the models")
SPANS = Rule("a list of (start, stop), or None", _spans)
MARKED = instance(Tensor, "a tensor of truth values [step, position], or None")


@checked_arguments(blocks=SPANS, revised=MARKED)
@own_colours()
def sink_positions(
    sinks: Received | Recording | Sinks | Trajectories,
    detector: Detector | str | None = None,
    *,
    layer: int | Literal["moving"] | None = "moving",
    head: int | Literal["moving"] | None = "moving",
    row: int = 0,
    queries: QueryClass = "all",
    follow: Follow = "position",
    blocks: Sequence[tuple[int, int]] | None = None,
    revised: Bool[Tensor, "step position"] | None = None,
    title: str = "",
) -> Figure:
    """Position of the key with the highest score at every step: filled where it is a sink, hollow where it is not.

    After Figure 7 of 2510.15731; of a rule whose sinks have low scores (`LowKeyNorm`), the key with the lowest one.
    Shaded cells are masked at that step. The labels on the right are the final tokens of the marked positions.
    Positions count from the prompt's first token.

    Args:
        sinks: from `received_over_steps`, a recording with ReceivedAttention, `Sinks` with a step axis, or
            `Trajectories`, which hold the largest key only where it is a sink.
        detector: the rule for a `Received` or a recording; `AboveMean(3.0)`, Eq. 3, by default.
        layer: index of the layer in the model; None for the mean over layers and heads. Without layer and head, the
            head whose sinks move most often; the caption names it.
        head: index of the head; None for the mean over heads.
        row: index of the sequence in the batch.
        queries: which queries count, of a recording; others have their own.
        follow: "position", of the canvas, or of a recording "token", as `trajectories` follows them: an axis of all
            tokens and masks that the row's canvases ever held, in their order.
        blocks: the row's block at each step as (start, stop) canvas positions, to draw the borders:
            `row_blocks(run, row)`, or `DenoisingRun.spans` where all rows have the same.
        revised: which decided tokens of the row each step rewrote, `run.revised[:, row]`, to mark them; by default
            a recording's own, without tokens that a step only moves.
        title: the beginning of the caption, such as the model's name.

    Raises:
        TypeError: another type, or a detector with `Sinks` or `Trajectories`.
        ValueError: an unknown layer, head or row, a layer without a head or the reverse, another level, another
            number of blocks than steps, rewritten tokens of other steps, or no head with a sink.
    """
    chosen = isinstance(layer, str) and isinstance(head, str) and layer == head == "moving"
    if isinstance(layer, str) or isinstance(head, str):
        if not chosen:
            raise ValueError(
                f"layer={shown(layer)}, head={shown(head)}: give both, or neither for the head that moves most"
            )
        layer, head = most_moving(trajectories_of(sinks, detector, queries, follow), row)
    track = track_of(sinks, detector, layer, head, row, queries, follow)
    steps, positions = len(track.largest), len(track.content)
    rewritten = track.marks(revised_of(sinks, row) if revised is None else revised)
    width, height = min(14.0, max(6.0, 0.09 * steps + 2.5)), min(10.0, max(3.4, 0.055 * positions + 1.6))
    figure = NotebookFigure(figsize=(width, height), layout="constrained")
    draw_track(figure.add_subplot(), track, height, blocks or (), rewritten)
    explain_tracks(figure, [track], blocks=bool(blocks), revised=bool(rewritten))
    return captioned(
        figure,
        title,
        _what([track]),
        f"rule: {track.rule}",
        level_label(track.level, layer, head, track.layers, track.heads) + ", whose sinks move most" * chosen,
        f"{counted_keys(positions, track.sinks, track.follow)}, {counted(sum(track.running), 'step')}, n = 1 "
        f"sequence (row {track.row})",
        f"sink in {sum(track.passes)} of {counted(sum(track.running), 'step')}",
        axes=figure.axes[0],
    )


@checked_arguments(models=BY_NAME, heads=BY_NAME, rows=BY_NAME, blocks=BY_NAME)
@own_colours()
def sink_positions_by_model(
    models: Mapping[str, Source],
    detector: Detector | str | None = None,
    *,
    heads: Mapping[str, tuple[int | None, int | None]],
    rows: Mapping[str, int] | None = None,
    queries: QueryClass = "all",
    follow: Follow = "position",
    blocks: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    title: str = "",
) -> Figure:
    """`sink_positions` of up to six models side by side, each with its own layer and head.

    Args:
        models: name of each model -> first argument of `sink_positions`.
        detector: the rule for `Received` and recordings; `AboveMean(3.0)`, Eq. 3, by default.
        heads: name -> (layer, head), with None as in `sink_positions`.
        rows: name -> sequence of the batch; 0 by default.
        queries: which queries count, as in `sink_positions`.
        follow: positions or tokens, as in `sink_positions`.
        blocks: name -> the row's block at each step, as in `sink_positions`.
        title: the beginning of the caption.

    Raises:
        ValueError: no model or too many, a model without an entry in `heads`, an entry of no model in `rows` or
            `blocks`, or as in `sink_positions`.
    """
    if not 1 <= len(models) <= MOST_MODELS:
        raise ValueError(f"{len(models)} models; give one to {MOST_MODELS}")
    missing = [name for name in models if name not in heads]
    if missing:
        raise ValueError(f"heads has no (layer, head) for {', '.join(missing)}")
    rows, blocks = rows or {}, blocks or {}
    if unknown := [name for name in (*rows, *blocks) if name not in models]:
        raise ValueError(f"rows or blocks have {shown(unknown[0])}; the models are {', '.join(models)}")
    across = min(3, len(models)) if len(models) != 4 else 2
    down = -(-len(models) // across)
    width, height = 4.6 * across, 3.5 * down
    figure = NotebookFigure(figsize=(width, height + 0.5), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    tracks, edits = {}, False
    for axes, (name, given) in zip(panels, models.items(), strict=False):
        rule = detector if not hasattr(given, "detector") else None
        row = rows.get(name, 0)
        track = tracks[name] = track_of(given, rule, *heads[name], row, queries, follow)
        spans = blocks.get(name, ())
        rewritten = track.marks(revised_of(given, row))
        edits = edits or bool(rewritten)
        draw_track(axes, track, 2.6, spans, rewritten)
        about = [
            name,
            level_label(track.level, *heads[name], track.layers, track.heads).removeprefix("level: "),
            counted_keys(len(track.content), track.sinks, track.follow),
            f"sink in {sum(track.passes)} of {counted(sum(track.running), 'step')}",
        ]
        axes.set_title(caption(about, 4.2), loc="left", fontsize=7.5, **PLAIN)
    explain_tracks(figure, list(tracks.values()), blocks=bool(blocks), revised=edits)
    return captioned(
        figure,
        title,
        _what(list(tracks.values())),
        *dict.fromkeys(f"rule: {track.rule}" for track in tracks.values()),
        "n = 1 sequence per model",
    )


@plot(
    "sink-positions",
    "position of the largest sink at every step (Figure 7); several recordings side by side",
    options=("layer", "head", "row", "pick", "detector", "queries", "follow"),
    needs="received",
    several=True,
)
def _draw(options: PlotOptions) -> Figure:
    if len(options.recordings) == 1:
        layer, head = options.place()
        return sink_positions(
            options.recording,
            options.rule,
            layer=layer,
            head=head,
            row=options.row,
            queries=options.queries,
            follow=options.follow,
            blocks=row_blocks(options.run, options.row),
            title=options.name,
        )
    received = {
        name: as_received(recording, options.queries, options.follow)
        for name, recording in options.recordings.items()
    }
    return sink_positions_by_model(
        options.recordings,
        options.rule,
        heads={name: options.place(of_model) for name, of_model in received.items()},
        rows=dict.fromkeys(received, options.row),
        queries=options.queries,
        follow=options.follow,
        blocks={name: row_blocks(recording.run, options.row) for name, recording in options.recordings.items()},
        title=", ".join(options.chosen) if options.title is None else options.title,
    )


def draw_track(
    axes: Axes,
    track: Track,
    height: float,
    blocks: Sequence[tuple[int, int]] = (),
    revised: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw the largest key of one pattern over the steps, in axes of about `height` inches.

    Args:
        axes: to draw in.
        track: the pattern's.
        height: of the axes.
        blocks: of every step.
        revised: the (step, key) of tokens that were rewritten.
    """
    _shade_masked(axes, track)
    _draw_blocks(axes, track.blocks(blocks) if blocks else ())
    _draw_marks(axes, track)
    if revised:
        steps, keys = zip(*revised, strict=True)
        axes.scatter(steps, keys, s=14, linewidths=0.8, zorder=4, marker="x", color="black", gid="revised")
    _name_axes(axes, track, height)
    if not any(track.passes):
        note(axes, "no sink by the rule at any step" if track.scored else "no key has a score", 0.93)


def _shade_masked(axes: Axes, track: Track) -> None:
    if track.masked is None:
        return
    steps, keys = track.masked.shape
    kinds = track.masked.long()
    if track.places is not None:
        there = track.places != NOWHERE
        kinds[:, : there.shape[1]][~there & there.any(0)] = 2
    draw_cells(
        axes,
        torch.arange(steps + 1).numpy() - 0.5,
        torch.arange(keys + 1).numpy() - 0.5,
        kinds.T.numpy().astype(float),
        cmap=ListedColormap(["white", MASKED, ABSENT]),
        vmin=0,
        vmax=2,
        zorder=0,
    )


def _draw_blocks(axes: Axes, blocks: Sequence[tuple[int, int] | None]) -> None:
    first = 0
    for step in range(1, len(blocks) + 1):
        if step == len(blocks) or blocks[step] != blocks[first]:
            if (block := blocks[first]) is None:
                first = step
                continue
            start, stop = block
            corner = (first - 0.5, start - 0.5)
            axes.add_patch(
                Rectangle(
                    corner, step - first, stop - start, fill=False, edgecolor=BLOCK, linestyle="--", linewidth=0.8
                )
            )
            first = step


def _draw_marks(axes: Axes, track: Track) -> None:
    steps = range(len(track.largest))
    sinks = [t for t in steps if track.passes[t]]
    others = [t for t in steps if track.largest[t] >= 0 and not track.passes[t]]
    for name, chosen, face, edge in (("sink", sinks, SINK, SINK), ("largest", others, "white", LARGEST)):
        places = [track.largest[t] for t in chosen]
        axes.scatter(chosen, places, s=16, linewidths=0.9, zorder=3, facecolors=face, edgecolors=edge, gid=name)


def _name_axes(axes: Axes, track: Track, height: float) -> None:
    axes.set_xlim(-0.5, len(track.largest) - 0.5)
    low, high = (min(track.content), max(track.content)) if track.content else (0, 0)
    if track.sinks:
        # After the canvas follows one line per learned sink token.
        axes.axhline(high + 0.5 - track.sinks, color="black", linewidth=1.2, gid="sinks")
    axes.set_ylim(low - 0.8, high + 0.8)
    for axis in (axes.xaxis, axes.yaxis):
        whole_ticks(axis)
    if track.steps:
        numbers = dict(enumerate(map(str, track.steps)))
        axes.xaxis.set_major_formatter(lambda place, _: numbers.get(round(place), ""))
    axes.tick_params(labelsize=7)
    axes.set_xlabel("step", fontsize=8)
    learned = "; above the line: learned sink" if track.sinks else ""
    what = "token, in the order of the canvases" if track.follow == "token" else "position"
    axes.set_ylabel(f"{what}{learned}", fontsize=8)
    if track.tokens is not None:
        _name_tokens(axes, track, spacing=(high - low + 2) / (height * 7))


def explain_tracks(figure: Figure, tracks: Sequence[Track], *, blocks: bool, revised: bool = False) -> None:
    """Draw a legend of the marks that can occur."""
    point: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4}
    key = "/".join(dict.fromkeys("lowest" if track.low else "largest" for track in tracks))
    handles: list[Artist] = [
        Line2D([], [], color=SINK, label=f"{key}, a sink by the rule", **point),
        Line2D([], [], color=LARGEST, mfc="white", label=f"{key}, no sink", **point),
    ]
    if any(track.masked is not None for track in tracks):
        label = open_label(*(track.uniform_noise for track in tracks))
        handles.append(Patch(facecolor=MASKED, label=label))
    if any(track.places is not None for track in tracks):
        handles.append(Patch(facecolor=ABSENT, label="not on the canvas"))
    if blocks:
        handles.append(Patch(facecolor="none", edgecolor=BLOCK, linestyle="--", label="block being decoded"))
    if revised:
        mark = Line2D(
            [], [], linestyle="", marker="x", markersize=4, color="black", label="token rewritten or opened again"
        )
        handles.append(mark)
    widest = 1.7  # inches of the longest label and its mark
    columns = max(1, min(len(handles), int(figure.get_figwidth() / widest)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=7, frameon=False)


def _what(tracks: Sequence[Track]) -> str:
    """What the marks are, for captions."""
    extreme = dict.fromkeys("lowest" if track.low else "highest" for track in tracks)
    keys = " or ".join(dict.fromkeys(track.follow for track in tracks))
    return f"{keys.capitalize()} with the {' or '.join(extreme)} score"


def _name_tokens(axes: Axes, track: Track, spacing: float) -> None:
    """Label positions with tokens on the right; labels that would overlap share a line."""
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
