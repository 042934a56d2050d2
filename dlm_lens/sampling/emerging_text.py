"""The texts of a run, and the answer after a step as cells: decided now, rewritten, open, end of text."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.display import Cell, Kind, Line, Preview
from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.moved_tokens import NOWHERE, between, has_next
from dlm_lens.sampling.token_text import TokenTexts

if TYPE_CHECKING:
    from dlm_lens.sampling.denoising_run import DenoisingRun

MASK, END = "▢", "∎"
LINES = 6
"""Steps whose text a preview shows."""

CELLS, STRIP_STEPS, STRIP_POSITIONS = 48, 64, 160
"""Most cells of a line, and steps and positions of the strip, of a preview."""


def parts_of_texts(
    run: "DenoisingRun",
) -> Iterator[tuple[Int[Tensor, "before"], Int[Tensor, "answer"], Int[Tensor, "after"]]]:
    """The final ids of every row without padding: before the answer, the answer up to its end, and after a gap.

    In joined runs there is padding after a row that ended before the longest one. Where a sampler resizes the text
    (`Sampler.resizes`), the answer is what is decided from the first position that was open to the last, also in a
    gap of the prompt, and the rest of the prompt follows it.
    """
    first, resizes = run.prompt_length, sampler_class(run.settings).resizes
    for row, (ids, keep) in enumerate(zip(run.tokens, run.attention_mask, strict=True)):
        if resizes:
            answer, decided = run.answer[row], keep & ~run.masked[-1, row]
            before, after = answer.cumsum(-1) == 0, answer.flip(-1).cumsum(-1).flip(-1) == 0
            yield ids[decided & before], ids[decided & ~before & ~after], ids[decided & after & ~before]
            continue
        prompt, answer = (ids[part][keep[part]] for part in (slice(first), slice(first, None)))
        # The canvas ends with a whole block where blocks are counted from the text (`Sampler.answer_length`).
        answer = answer[: run.settings.get("gen_length") or None]
        stops = torch.isin(answer, answer.new_tensor(run.eos_token_ids)).nonzero()
        yield prompt, answer[: int(stops[0])] if len(stops) else answer, answer[:0]


def canvas_after(
    run: "DenoisingRun", row: int, step: int
) -> tuple[Int[Tensor, "position"], Bool[Tensor, "position"]]:
    """The token ids of a row after a step, and which positions are open.

    A part of a run may leave out the step that follows. Then the next canvas of the part is a later one, and what
    the step itself changed is put on its own canvas. There a revised position is open again if it is open on that
    later canvas, or if the step proposed no other token; one that a step between has decided again looks rewritten.
    Where tokens move (`part_of_run`), what it deleted is open there.

    Args:
        run: from `denoise`, or a part of a run.
        row: index of the sequence in the batch.
        step: index of the step in this run.
    """
    canvas = run.canvases[step, row]
    if has_next(run, step):
        return run.canvases[step + 1, row], run.masked[step + 1, row]
    new, again, proposed = run.unmasked[step, row], run.revised[step, row], run.proposals[step, row]
    opened = again & ((proposed == canvas) | (run.masked[step + 1, row] & (run.origins is None)))
    return torch.where(new | again, proposed, canvas), (run.masked[step, row] & ~new) | opened


def came_by(run: "DenoisingRun", row: int, first: int, step: int) -> Int[Tensor, "position"]:
    """Where what a row's canvas after a step (`canvas_after`) holds was on that of step `first`; -1 for nowhere."""
    if run.origins is None:
        return torch.arange(run.tokens.shape[1], device="cpu")
    return between(run.origins[:, [row]], first, step + has_next(run, step))[0]


def changed_by(
    run: "DenoisingRun", row: int, step: int
) -> tuple[Bool[Tensor, "position"], Bool[Tensor, "position"]]:
    """The positions of a row that a step decides, and those that it rewrites or opens again.

    A decided token that the step only moves is among neither, unlike in `run.unmasked` and `run.revised`, which are
    of positions.
    """
    new, again = run.unmasked[step, row], run.revised[step, row]
    if run.origins is None:
        return new, again
    came, (tokens, opened) = came_by(run, row, step, step), canvas_after(run, row, step)
    was_open = (came == NOWHERE) | run.masked[step, row, came]
    other = opened | (tokens != run.canvases[step, row, came])
    return (new | again) & was_open & ~opened, (new | again) & ~was_open & other


def changed_on_canvas(
    run: "DenoisingRun", row: int
) -> tuple[Bool[Tensor, "step position"], Bool[Tensor, "step position"]]:
    """`changed_by` of every step at the positions of its own canvas; what it deletes is among the rewritten."""
    if run.origins is None:
        return run.unmasked[:, row], run.revised[:, row]
    new, again = torch.zeros(2, *run.unmasked[:, row].shape, dtype=torch.bool)
    for step in range(run.steps):
        new[step], again[step] = changes_of_step(run, row, step)
    return new, again


def changes_of_step(
    run: "DenoisingRun", row: int, step: int
) -> tuple[Bool[Tensor, "position"], Bool[Tensor, "position"]]:
    """`changed_by` at the positions of the step's own canvas; what it deletes is among the rewritten."""
    came = came_by(run, row, step, step)
    there = came != NOWHERE
    new, again = torch.zeros_like(there), ~run.masked[step, row]
    again[came[there]] = False
    for flags, changed in zip((new, again), changed_by(run, row, step), strict=True):
        flags[came[there & changed]] = True
    return new, again


def emerging_cells(run: "DenoisingRun", row: int, step: int) -> list[Cell]:
    """The answer after a step: open positions as ▢, end of text as ∎, a tail of equal tokens once with its count.

    Args:
        run: from `denoise`.
        row: index of the sequence in the batch.
        step: index of the step.
    """
    shown = _answer(run, row)
    kinds = _kinds(run, row, step, shown)
    tokens, opened = canvas_after(run, row, step)
    return _named(run, tokens[shown], opened[shown], kinds)


def answer_cells(run: "DenoisingRun", marked: Bool[Tensor, "position"], row: int = 0) -> list[Cell]:
    """The finished answer of a row, with some positions marked as rewritten."""
    shown = _answer(run, row)
    kinds: list[Kind] = ["revised" if one else "plain" for one in marked[shown].tolist()]
    return _cut(_named(run, run.tokens[row, shown], run.masked[-1, row, shown], kinds))


def _named(run: "DenoisingRun", ids: Any, masked: Any, kinds: Sequence[Kind]) -> list[Cell]:
    texts = TokenTexts(run.tokenizer)
    cells = []
    for token, hidden, kind in zip(ids.tolist(), masked.tolist(), kinds, strict=True):
        ends = token in run.eos_token_ids and not hidden
        text = MASK if hidden else END if ends else texts.label(token, 24)
        cells.append(Cell(text, "end" if ends and kind == "plain" else kind))
    return _collapsed(cells)


def _cut(cells: list[Cell]) -> list[Cell]:
    """As many cells as a line holds, then how many more there are."""
    return cells if len(cells) <= CELLS else [*cells[:CELLS], Cell(f"… {len(cells) - CELLS} more", "open")]


def preview(run: "DenoisingRun", row: int = 0) -> Preview:
    """The first row of a run: its text after a few steps, and what every step decided."""
    steps, rows = int(run.row_steps[row]), len(run.tokens)
    if not steps:
        return Preview()
    chosen = sorted({round(i * (steps - 1) / max(1, LINES - 1)) for i in range(LINES)})
    lines = [Line(f"step {run.step_numbers[step]}", _cut(emerging_cells(run, row, step))) for step in chosen]
    others = f"row {row} of {rows}; " if rows > 1 else ""
    return Preview(
        lines=lines, strip=_strip(run, row, steps), note=f"{others}texts: .texts; in a terminal: emerging_lines"
    )


def _answer(run: "DenoisingRun", row: int) -> Any:
    """The positions of the answer, and those of the prompt that were masked."""
    shown = run.attention_mask[row].clone()
    resizes = sampler_class(run.settings).resizes  # after a gap the rest of the prompt follows
    shown[: None if resizes else run.prompt_length] &= run.answer[row, : None if resizes else run.prompt_length]
    return shown


def _kinds(run: "DenoisingRun", row: int, step: int, shown: Any) -> list[Kind]:
    """What every shown position is after a step. A position that was opened again is "revised"."""
    new, again = (positions[shown].tolist() for positions in changed_by(run, row, step))
    opened = canvas_after(run, row, step)[1][shown].tolist()
    return [
        "open" if hidden and (fresh or not edited) else "new" if fresh else "revised" if edited else "plain"
        for fresh, edited, hidden in zip(new, again, opened, strict=True)
    ]


def _strip(run: "DenoisingRun", row: int, steps: int) -> list[list[Kind]]:
    """Rows of kinds for at most 64 steps of at most 160 positions, evenly spread."""
    shown = _answer(run, row)
    chosen = sorted({round(i * (steps - 1) / max(1, STRIP_STEPS - 1)) for i in range(STRIP_STEPS)})
    width = int(shown.sum())
    places = sorted({round(i * (width - 1) / max(1, STRIP_POSITIONS - 1)) for i in range(STRIP_POSITIONS)})
    if width < 1:
        return []
    return [[kinds[place] for place in places] for kinds in (_kinds(run, row, step, shown) for step in chosen)]


def _collapsed(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, where four or more equal texts at the end become one with their number."""
    tail = 0
    while tail < len(cells) and cells[-1 - tail].text == cells[-1].text:
        tail += 1
    if tail < 4:
        return list(cells)
    kinds = {cell.kind for cell in cells[len(cells) - tail :]}
    kind: Kind = "new" if "new" in kinds else "revised" if "revised" in kinds else "end"
    return [*cells[: len(cells) - tail], Cell(f"{cells[-1].text} ×{tail}", kind)]
