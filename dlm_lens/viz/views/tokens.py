"""circuitsvis views of the text: tokens coloured by what they receive, and text emerging over steps."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.recording import Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Received
from dlm_lens.viz.figures.labels import counted_keys, level_label
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received, choose
from dlm_lens.viz.views.terminal_text import MASK
from dlm_lens.viz.views.view import Piece, View, web_labels

TOKENS = 4096
"""Most tokens of one view."""

LINES = 8
"""Steps of a view by default."""

RECEIVED, WRITTEN = "#b2182b", "#1b7837"


def received_tokens(
    received: Received | Recording,
    *,
    layer: int | None,
    head: int | None,
    row: int = 0,
    steps: Sequence[int] | None = None,
) -> View:
    """The canvas at a few steps, every token coloured by the attention that it receives; hovering shows the score.

    Args:
        received: from `received_over_steps`, or a recording with ReceivedAttention.
        layer: index of the layer in the model; None for the mean over layers and heads.
        head: index of the head; None for the mean over heads.
        row: which sequence of the batch.
        steps: the steps; None for 8 spread over the run.

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: a layer, head, row or step that is not there, or no tokens.
    """
    received = as_received(received)
    shown = choose(received, layer, head, row)
    if shown.received.tokens is None:
        raise ValueError("this Received knows no tokens; received_over_steps and recordings do")
    count = len(shown.scores)
    chosen = _steps(steps, count, shown.steps)
    content, said = _kept(shown.content, len(chosen))
    top = float(shown.scores[chosen][:, content].nan_to_num(nan=0.0).max())
    pieces = []
    for step in chosen:
        ids = shown.received.tokens[step, 0, content].tolist()
        masked = torch.zeros(len(ids)).bool() if shown.masked is None else shown.masked[step, content]
        labels = [
            MASK if hidden else label
            for label, hidden in zip(web_labels(ids, received.tokenizer), masked.tolist(), strict=True)
        ]
        pieces.append(
            Piece("ColoredTokens", _coloured(labels, shown.scores[step, content], top, RECEIVED), f"step {step}")
        )
    about = (
        f"scale: {received.scale}; {level_label(shown.level, layer, head)}; queries: {received.queries}; "
        f"{counted_keys(len(content), received.sinks)}, n = 1 sequence (row {row}). {MASK} is masked; white is 0, "
        f"the darkest {top:.3g}.",
        *said,
    )
    return View("Received attention of every token", about, tuple(pieces))


def emerging_text(run: DenoisingRun, *, row: int = 0, steps: Sequence[int] | None = None) -> View:
    """The canvas as a few steps leave it: masks as ▢, what was written since the line before in colour.

    Args:
        run: from `denoise`.
        row: which sequence of the batch.
        steps: the steps; None for 8 spread over the run.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a row or step that is not there.
    """
    if not isinstance(run, DenoisingRun):
        raise TypeError(f"the run is a {type(run).__name__}; give the DenoisingRun that dlm_lens.denoise returned")
    if not 0 <= row < len(run.tokens):
        raise ValueError(f"row {row} of {len(run.tokens)}: rows go from 0")
    chosen = _steps(steps, run.steps, int(run.row_steps[row]))
    content, said = _kept(run.attention_mask[row].nonzero().flatten(), len(chosen))
    pieces, before = [], run.masked[0, row, content]
    for step in chosen:
        masked = run.masked[step + 1, row, content]
        labels = web_labels(run.canvases[step + 1, row, content].tolist(), run.tokenizer)
        labels = [MASK if hidden else label for label, hidden in zip(labels, masked.tolist(), strict=True)]
        fresh = (before & ~masked).float()
        pieces.append(Piece("ColoredTokens", _coloured(labels, fresh, 1.0, WRITTEN), f"after step {step}"))
        before = masked
    about = (
        f"{run.steps} steps, sequence {row}. {MASK} is masked; green was written since the line before.",
        *said,
    )
    return View("Text emerging over steps", about, tuple(pieces))


@plot(
    "received-tokens",
    "circuitsvis: the text, coloured by received attention",
    options=("layer", "head", "row", "steps", "pick"),
    needs="received",
    formats=(".html",),
)
def _draw_received(options: PlotOptions) -> View:
    layer, head = options.place()
    steps = options.steps or None
    return received_tokens(options.received, layer=layer, head=head, row=options.row, steps=steps)


@plot(
    "emerging-text",
    "circuitsvis: the text after each of a few steps",
    options=("row", "steps"),
    formats=(".html",),
)
def _draw_text(options: PlotOptions) -> View:
    return emerging_text(options.run, row=options.row, steps=options.steps or None)


def _steps(steps: Sequence[int] | None, count: int, ran: int) -> list[int]:
    """The given steps of `count`, or some spread over those that the row ran."""
    if steps is None:
        lines = min(LINES, ran)
        return sorted({round(i * (ran - 1) / max(1, lines - 1)) for i in range(lines)})
    chosen = [int(step) for step in steps]
    for step in chosen:
        if not 0 <= step < count:
            raise ValueError(f"step {step} is not there; steps go from 0 to {count - 1}")
    if not chosen:
        raise ValueError("steps is empty; give at least one, or None for some")
    return chosen


def _kept(content: Tensor, lines: int) -> tuple[Tensor, tuple[str, ...]]:
    """The last positions that fit, and a sentence if not all do."""
    room = max(8, TOKENS // lines)
    if len(content) <= room:
        return content, ()
    return content[-room:], (f"Shown are the last {room} of {len(content)} positions; give fewer steps for more.",)


def _coloured(labels: list[str], values: Float[Tensor, "token"], top: float, colour: str) -> dict[str, Any]:
    # A token's own space is shown as a character: without one between them tokens would run into each other.
    labels = [f"{label} " for label in labels]
    numbers = [round(value, 4) for value in values.double().nan_to_num(nan=0.0).tolist()]
    return {
        "tokens": labels,
        "values": numbers,
        "minValue": -max(top, 1e-9),
        "maxValue": max(top, 1e-9),
        "positiveColor": colour,
    }
