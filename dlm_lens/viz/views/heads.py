"""circuitsvis views of the patterns of one step: all heads of a layer, one head, one head times value norms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import INDICES, checked_arguments
from dlm_lens.attention import HookLike
from dlm_lens.printable import counted
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.viz.attention_snapshot import Snapshot, rows_sum, snapshot
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import index_of, row_number
from dlm_lens.viz.sink_tracks import row_blocks
from dlm_lens.viz.views.view import Piece, View, rounded, web_labels

ENTRIES = 2**18
"""The largest number of pattern entries of one view; a browser draws a rectangle for each."""

COLOUR = "#08519c"


@checked_arguments(positions=INDICES)
def attention_heads(
    run: RunLike,
    model: Any,
    *,
    step: int,
    layer: int,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    positions: Sequence[int] | None = None,
) -> View:
    """Patterns of all heads of a layer at one step: small ones to select a head, and the selected one large.

    The full square is shown, since a DLM attends in both directions. The query is circuitsvis's destination, the
    key its source.

    Args:
        run: from `denoise`.
        model: the model of the run, as `dlm_lens.load` returned it.
        step: index of the step; the model runs again on its canvas.
        layer: index of the layer.
        row: index of the sequence in the batch.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        positions: canvas positions to show; None for all, or of a long canvas for those around the block being
            decoded, with a sentence in the view.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a step, layer, row or position that the run does not have.
    """
    run = as_run(run)
    shot = snapshot(model, run, step=step, layer=layer, row=row, hooks=hooks)
    kept, cropped = _cropped(shot, run, positions, len(shot.pattern))
    names = [f"head {head}" for head in range(len(shot.pattern))]
    props = _props(shot, shot.pattern, kept) | {"attentionHeadNames": names}
    scale = _scale(f"attention A_ij, {rows_sum(shot)}", props)
    about = (_where(shot, run, "level: head"), scale, *_numbering(shot, kept), *cropped)
    return View(f"Attention heads of layer {shot.layer} at step {step}", about, (Piece("AttentionHeads", props),))


@checked_arguments(positions=INDICES)
def attention_pattern(
    run: RunLike,
    model: Any,
    *,
    step: int,
    layer: int,
    head: int,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    positions: Sequence[int] | None = None,
) -> View:
    """Pattern of one head at one step; the tooltip of an entry shows tokens and A_ij.

    circuitsvis numbers the shown keys from 0. Where those are not the positions, a token's label has its position
    too, as in "w7 @12".

    Args and raises: as `attention_heads`; `head` is the index of the head.
    """
    run = as_run(run)
    shot = snapshot(model, run, step=step, layer=layer, row=row, hooks=hooks)
    return _one_head(shot, run, head, positions, shot.pattern, "Attention", f"attention A_ij, {rows_sum(shot)}")


@checked_arguments(positions=INDICES)
def value_weighted_pattern(
    run: RunLike,
    model: Any,
    *,
    step: int,
    layer: int,
    head: int,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    positions: Sequence[int] | None = None,
) -> View:
    """A_ij ||v_j|| of one head at one step: the size of what query i reads from key j, small for a sink.

    After the value-weighted patterns of 2004.10102 (which includes the output projection); in the units of the
    values.

    Args and raises: as `attention_heads`; `head` is the index of the head.
    """
    run = as_run(run)
    shot = snapshot(model, run, step=step, layer=layer, row=row, hooks=hooks)
    weighted, unit = shot.pattern * shot.value_norms[:, None], "A_ij ||v_j||, in the units of the values"
    return _one_head(shot, run, head, positions, weighted, "Value-weighted attention", unit, sums=False)


@plot(
    "attention-heads",
    "circuitsvis: all heads of a layer at a step; runs the model",
    options=("layer", "row", "steps", "pick", "queries", "hooks", "model"),
    formats=(".html",),
)
def _draw_heads(options: PlotOptions) -> View:
    layer, step = options.one_layer(), options.step()
    return attention_heads(
        options.run, options.network, step=step, layer=layer, row=options.row, hooks=options.interventions
    )


@plot(
    "attention-pattern",
    "circuitsvis: the pattern of one head at a step; runs the model",
    options=("layer", "head", "row", "steps", "pick", "queries", "hooks", "model"),
    formats=(".html",),
)
def _draw_pattern(options: PlotOptions) -> View:
    return _draw_one_head(attention_pattern, options)


@plot(
    "value-weighted-pattern",
    "circuitsvis: the pattern of one head times value norms; runs the model",
    options=("layer", "head", "row", "steps", "pick", "queries", "hooks", "model"),
    formats=(".html",),
)
def _draw_value_weighted(options: PlotOptions) -> View:
    return _draw_one_head(value_weighted_pattern, options)


def _draw_one_head(view: Callable[..., View], options: PlotOptions) -> View:
    (layer, head), step = options.one_head(), options.step()
    return view(
        options.run,
        options.network,
        step=step,
        layer=layer,
        head=head,
        row=options.row,
        hooks=options.interventions,
    )


def _one_head(
    shot: Snapshot,
    run: DenoisingRun,
    head: int,
    positions: Sequence[int] | None,
    values: Float[Tensor, "head query key"],
    name: str,
    unit: str,
    *,
    sums: bool = True,
) -> View:
    """The view of one head's values per query and key; `sums` as for `_cropped`."""
    place = index_of("head", head, range(len(values)))
    kept, cropped = _cropped(shot, run, positions, 1, sums=sums)
    props = _props(shot, values[place], kept) | {"showAxisLabels": True}
    where = _where(shot, run, f"level: head (head {head})")
    about = (where, _scale(unit, props), *_numbering(shot, kept), *cropped)
    title = f"{name} of layer {shot.layer}, head {head} at step {shot.step}"
    return View(title, about, (Piece("AttentionPattern", props),))


def _props(shot: Snapshot, values: Float[Tensor, "*head query key"], kept: Tensor) -> dict[str, Any]:
    """The props of circuitsvis, without its triangular mask, which would hide half of a DLM's attention."""
    shown = values[..., kept, :][..., kept]
    labels = web_labels([shot.tokens[i] for i in kept.tolist()], shot.tokenizer)
    for place, number in enumerate(_positions_to_name(shot, kept)):
        labels[place] += f" @{number}"
    top = max(float(shown.max()), 1e-9)
    return {
        "tokens": labels,
        "attention": rounded(shown),
        "maxValue": top,
        "minValue": -top,
        "positiveColor": COLOUR,
        "maskUpperTri": False,
    }


def _positions_to_name(shot: Snapshot, kept: Tensor) -> list[int]:
    """Positions of the shown tokens; none where they are 0, 1, ..., by which circuitsvis numbers tokens."""
    numbers = [shot.positions[i] - shot.padding for i in kept.tolist() if i < len(shot.positions)]
    return [] if numbers == list(range(len(numbers))) else numbers


def _numbering(shot: Snapshot, kept: Tensor) -> tuple[str, ...]:
    """What the numbers in the view count, if those of circuitsvis are not positions."""
    if not _positions_to_name(shot, kept):
        return ()
    return ("After @ is the position of a token; the numbers in parentheses count the shown keys from 0.",)


def _cropped(
    shot: Snapshot, run: DenoisingRun, positions: Sequence[int] | None, patterns: int, *, sums: bool = True
) -> tuple[Tensor, tuple[str, ...]]:
    """The keys to show, and a sentence if they are not all; `sums`: it says what is missing in sums of rows."""
    count, sinks = len(shot.positions), torch.arange(len(shot.positions), len(shot.tokens))
    if positions is not None:
        wanted = [int(position) for position in positions]
        missing = [position for position in wanted if position not in shot.positions]
        if missing or not wanted:
            raise ValueError(
                f"positions {missing or wanted}: give canvas positions among {shot.positions[0]} to "
                f"{shot.positions[-1]}"
            )
        kept = torch.tensor([shot.positions.index(position) for position in wanted])
    else:
        room = max(8, int((ENTRIES / patterns) ** 0.5) - shot.sinks)
        if room >= count:
            return torch.arange(len(shot.tokens)), ()
        start, stop = row_blocks(run, shot.row)[run.step_numbers.index(shot.step)]
        inside = [i for i, position in enumerate(shot.positions) if start <= position < stop] or [count // 2]
        first = min(max(0, (inside[0] + inside[-1] + 1 - room) // 2), count - room)
        kept = torch.arange(first, first + room)
    shown = [shot.positions[i] for i in kept.tolist()]
    first, last = min(shown), max(shown)
    canvas = f" ({first} to {last} on the canvas)" if shot.padding else ""
    left_out = "; rows sum to less than 1 by the keys that are left out" if sums else ""
    sentence = (
        f"Shown are {len(shown)} of {count} positions, {first - shot.padding} to {last - shot.padding}{canvas}"
        f"{left_out}. Give canvas positions= to show others."
    )
    return torch.cat([kept, sinks]), (sentence,)


def _scale(unit: str, props: dict[str, Any]) -> str:
    return f"scale: {unit}; white is 0, the darkest {props['maxValue']:.3g}"


def _where(shot: Snapshot, run: DenoisingRun, level: str) -> str:
    """Level, layer, step and row in words; `shot.row` is an index in `run`, which may be a part."""
    learned = f", and {counted(shot.sinks, 'learned sink token')} after them" if shot.sinks else ""
    masked, word = int(shot.masked.sum()), "open" if shot.uniform_noise else "masked"
    under = f" Under {', '.join(shot.hooks)}." if shot.hooks else ""
    return (
        f"{level}; layer {shot.layer}; step {shot.step}; sequence {row_number(run, shot.row)}; "
        f"{len(shot.positions)} positions, {masked} of them {word}{learned}.{under} Rows (destination) are "
        "queries, columns (source) keys."
    )
