"""circuitsvis views of the text: tokens coloured by received attention, and the text after each of a few steps."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import checked_arguments
from dlm_lens.printable import counted
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling.denoising_run import holds_random_tokens
from dlm_lens.sampling.emerging_text import MASK, came_by, canvas_after
from dlm_lens.sampling.moved_tokens import NOWHERE, has_next
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sinks import Received
from dlm_lens.viz.figures.labels import counted_keys, level_label
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plot
from dlm_lens.viz.selection import as_received, choose, index_of, over_before, row_number, step_places
from dlm_lens.viz.views.view import Piece, View, rounded, web_labels

TOKENS = 4096
"""The largest number of tokens of one view."""

LINES = 8
"""Default number of steps of a view."""

RECEIVED, WRITTEN = "#b2182b", "#1b7837"
REVISED = "↻"
"""Before a token that was rewritten."""
UNSCORED = "†"
"""After a token without a defined score."""


@checked_arguments(steps=None)
def received_tokens(
    received: Received | Recording,
    *,
    layer: int | None,
    head: int | None,
    row: int = 0,
    steps: Sequence[int] | None = None,
    queries: QueryClass = "all",
) -> View:
    """The canvas at a few steps, every token coloured by the attention that it receives; its tooltip is the score.

    A token without a defined score has † after it; its tooltip is 0, since circuitsvis takes numbers alone.

    Args:
        received: from `received_over_steps`, or a recording with ReceivedAttention.
        layer: index of the layer in the model; None for the mean over layers and heads.
        head: index of the head; None for the mean over heads.
        row: index of the sequence in the batch.
        steps: the steps of the run; None for 8 that are evenly spread.
        queries: which queries count, of a recording; a `Received` has its own.

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: an unknown layer, head, row or step, or a `Received` without tokens.
    """
    shown, received = choose(received, layer, head, row, queries), as_received(received, queries)
    level = level_label(shown.level, layer, head, shown.layers, shown.heads)
    if shown.received.tokens is None:
        raise ValueError("this Received has no tokens; those of received_over_steps and of recordings have")
    numbers = received.step_numbers
    chosen = _steps(steps, numbers, shown.steps)
    content, cropped = _last_positions(shown.content, len(chosen))
    top = float(shown.scores[chosen][:, content].nan_to_num(nan=0.0).max())
    unscored = shown.scores[chosen][:, content].isnan()
    pieces = []
    for step, without in zip(chosen, unscored.tolist(), strict=True):
        ids = shown.received.tokens[step, 0, content].tolist()
        masked = torch.zeros(len(ids)).bool() if shown.masked is None else shown.masked[step, content]
        labels = [
            (MASK if hidden else label) + UNSCORED * undefined
            for label, hidden, undefined in zip(
                web_labels(ids, received.tokenizer), masked.tolist(), without, strict=True
            )
        ]
        pieces.append(
            Piece(
                "ColoredTokens",
                _coloured(labels, shown.scores[step, content], top, RECEIVED),
                f"step {numbers[step]}",
            )
        )
    word = "open" if holds_random_tokens(received.tokens, received.masked) else "masked"
    no_score = f"{UNSCORED} has no score: it is visible to fewer than {received.min_viewers} counted queries."
    about = (
        f"scale: {received.scale}; {level}; queries: {received.queries}; "
        f"{counted_keys(len(content), received.sinks)}, n = 1 sequence (row {shown.row}). {MASK} is {word}; "
        f"white is 0, the darkest {top:.3g}.",
        *([no_score] if bool(unscored.any()) else []),
        *cropped,
    )
    return View("Received attention of every token", about, tuple(pieces))


@checked_arguments(steps=None)
def emerging_text(run: RunLike, *, row: int = 0, steps: Sequence[int] | None = None) -> View:
    """The canvas after a few steps: open positions as ▢, tokens that were decoded since the previous line in green.

    A token that a step since then has rewritten is in red, with ↻ before it.

    Args:
        run: from `denoise`.
        row: index of the sequence in the batch.
        steps: the steps of the run; None for 8 that are evenly spread.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a row or step that the run does not have, or a row that was over before the steps of a part.
    """
    run = as_run(run)
    index_of("row", row, range(len(run.tokens)))
    if steps is None and not int(run.row_steps[row]):
        raise ValueError(over_before(row))
    chosen = _steps(steps, run.step_numbers, int(run.row_steps[row]))
    content, cropped = _last_positions(run.attention_mask[row].nonzero().flatten(), len(chosen))
    pieces, before, first, last = [], (run.canvases[0, row], run.masked[0, row]), 0, 0
    for step in chosen:
        came, after = came_by(run, row, first, step)[content], canvas_after(run, row, step)
        tokens, masked = (of_row[content] for of_row in after)
        was_open = (came == NOWHERE) | before[1][came]
        labels = web_labels(tokens.tolist(), run.tokenizer)
        labels = [MASK if hidden else label for label, hidden in zip(labels, masked.tolist(), strict=True)]
        revised = run.revised[last : step + 1, row, content].any(0)  # of positions, from which tokens may move
        edited = (revised if run.origins is None else tokens != before[0][came]) & ~was_open & ~masked
        labels = [
            f"{REVISED}{label}" if again else label for label, again in zip(labels, edited.tolist(), strict=True)
        ]
        fresh, last = (was_open & ~masked).float() - edited.float(), step + 1
        name = f"after step {run.step_numbers[step]}"
        pieces.append(Piece("ColoredTokens", _coloured(labels, fresh, 1.0, WRITTEN), name))
        before, first = after, step + has_next(run, step)
    word = "open" if run.uniform_noise else "masked"
    about = (
        f"{counted(run.steps, 'step')}, sequence {row_number(run, row)}. {MASK} is {word}; green was decoded "
        "since the previous line.",
        *([f"{REVISED} (red) was rewritten since the previous line."] if bool(run.revised[:, row].any()) else []),
        *cropped,
    )
    return View("Text emerging over steps", about, tuple(pieces))


@plot(
    "received-tokens",
    "circuitsvis: the text, coloured by received attention",
    options=("layer", "head", "row", "steps", "pick", "queries"),
    needs="received",
    formats=(".html",),
)
def _draw_received(options: PlotOptions) -> View:
    layer, head = options.place()
    steps, queries = options.steps or None, options.queries
    return received_tokens(options.recording, layer=layer, head=head, row=options.row, steps=steps, queries=queries)


@plot(
    "emerging-text",
    "circuitsvis: the text after each of a few steps",
    options=("row", "steps"),
    formats=(".html",),
)
def _draw_text(options: PlotOptions) -> View:
    return emerging_text(options.run, row=options.row, steps=options.steps or None)


def _steps(steps: Sequence[int] | None, numbers: Sequence[int], ran: int) -> list[int]:
    """The places of the given steps, or of some that are evenly spread over those that the row ran."""
    if steps is None:
        lines = min(LINES, ran)
        return sorted({round(i * (ran - 1) / max(1, lines - 1)) for i in range(lines)})
    return step_places(steps, numbers)


def _last_positions(content: Tensor, lines: int) -> tuple[Tensor, tuple[str, ...]]:
    """The last positions that fit into a view, and a sentence if not all do."""
    room = max(8, TOKENS // lines)
    if len(content) <= room:
        return content, ()
    return content[-room:], (f"Shown are the last {room} of {len(content)} positions; give fewer steps for more.",)


def _coloured(labels: list[str], values: Float[Tensor, "token"], top: float, colour: str) -> dict[str, Any]:
    # Spaces of tokens are shown as characters, so that this one separates tokens.
    labels = [f"{label} " for label in labels]
    return {
        "tokens": labels,
        "values": rounded(values.nan_to_num(nan=0.0), least=4),
        "minValue": -max(top, 1e-9),
        "maxValue": max(top, 1e-9),
        "positiveColor": colour,
    }
