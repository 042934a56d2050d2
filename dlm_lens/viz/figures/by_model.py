"""`sink_positions_by_model`: Figure 7 of 2510.15731 as it is printed, several models side by side."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from dlm_lens.sinks import Detector
from dlm_lens.viz.figures.labels import PLAIN, caption, counted_keys, level_label
from dlm_lens.viz.figures.notebook_figure import NotebookFigure
from dlm_lens.viz.figures.positions import draw_track, explain_track
from dlm_lens.viz.sink_tracks import Source, track_of

MOST_MODELS = 6


def sink_positions_by_model(
    models: Mapping[str, Source],
    detector: Detector | None = None,
    *,
    heads: Mapping[str, tuple[int | None, int | None]],
    rows: Mapping[str, int] | None = None,
    blocks: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    title: str = "",
) -> Figure:
    """`sink_positions` of up to six models side by side, each with its own layer and head.

    Args:
        models: name of each model -> what `sink_positions` takes.
        detector: the rule where none was applied yet; `AboveMean(3.0)`, Eq. 3, by default.
        heads: name -> (layer, head), with None as in `sink_positions`.
        rows: name -> sequence of the batch; 0 by default.
        blocks: name -> the block at each step, `DenoisingRun.spans`.
        title: what stands in front of the caption.

    Raises:
        ValueError: no or too many models, a model without its head, or what `sink_positions` raises.
    """
    if not 1 <= len(models) <= MOST_MODELS:
        raise ValueError(f"{len(models)} models; give one to {MOST_MODELS} to stand side by side")
    missing = [name for name in models if name not in heads]
    if missing:
        raise ValueError(f"heads names no (layer, head) for {', '.join(missing)}")
    rows, blocks = rows or {}, blocks or {}
    across = min(3, len(models)) if len(models) != 4 else 2
    down = -(-len(models) // across)
    width, height = 4.6 * across, 3.5 * down
    figure = NotebookFigure(figsize=(width, height + 0.5), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    tracks = {}
    for axes, (name, given) in zip(panels, models.items(), strict=False):
        rule = detector if not hasattr(given, "detector") else None
        track = tracks[name] = track_of(given, rule, *heads[name], rows.get(name, 0))
        spans = blocks.get(name, ())
        if spans and len(spans) != len(track.largest):
            raise ValueError(f"{name}: {len(spans)} blocks for {len(track.largest)} steps; give run.spans")
        draw_track(axes, track, 2.6, spans)
        about = [
            name,
            level_label(track.level, *heads[name]).removeprefix("level: "),
            counted_keys(len(track.content), track.sinks),
            f"sink in {sum(track.passes)} of {sum(track.defined)} steps",
        ]
        axes.set_title(caption(about, 4.2), loc="left", fontsize=7.5, **PLAIN)
    explain_track(figure, masked=any(t.masked is not None for t in tracks.values()), blocks=bool(blocks))
    sentences = [
        *([title] if title else []),
        "Position that receives most",
        *dict.fromkeys(f"rule: {track.rule}" for track in tracks.values()),
        "n = 1 sequence per model",
    ]
    figure.suptitle(caption(sentences, width), fontsize=8, x=0.01, ha="left", **PLAIN)
    return figure
