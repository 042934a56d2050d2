"""`RunPart` and `part_of_run`: some steps and rows of a run, which know their place in the whole run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.emerging_text import came_by, canvas_after, changes_of_step
from dlm_lens.sampling.moved_tokens import NOWHERE, answer_of, between, has_next

if TYPE_CHECKING:
    from dlm_lens.sampling.denoising_run import DenoisingRun


@dataclass(frozen=True)
class RunPart:
    """The place of a part's steps in the whole run, and what cannot be read from them.

    Args:
        numbers: the number of each step in the whole run.
        block_numbers: the number of each step among those of its block.
        answer: the positions that were open at the start of the whole run; where tokens move (`origins`), on the
            first canvas of the part.
        rows_ran: after how many steps of the whole run each row was over; None if that is not known.
    """

    numbers: tuple[int, ...]
    block_numbers: tuple[int, ...]
    answer: Bool[Tensor, "batch position"]
    rows_ran: tuple[int, ...] | None = None


def part_of_run(run: "DenoisingRun", steps: Sequence[int] | None, rows: Sequence[int]) -> "DenoisingRun":
    """Some steps and rows of a run (None: all steps); the final canvas is kept.

    Where tokens move (`origins`), `unmasked`, `revised` and `proposals` of a step whose next step the part leaves
    out are at the positions of the step's own canvas: the part does not have the one to which it moved them.

    Args:
        run: the whole, or a part itself.
        steps: indices of the steps, as in `run.canvases`.
        rows: indices of the rows.

    Raises:
        ValueError: steps out of order, of which one after a row's end comes before another one.
    """
    chosen = list(range(run.steps)) if steps is None else list(steps)
    rows = list(rows)
    whole = run.part is None and chosen == list(range(run.steps))
    seeds = run.settings.get("seeds")
    settings, ran = dict(run.settings), run.row_steps.tolist()  # a part does not show where rows ended
    for row in rows:
        running = [step < ran[row] for step in chosen]
        if running != sorted(running, reverse=True):
            raise ValueError(
                f"steps {', '.join(map(str, chosen))}: row {row} was over after {ran[row]} steps, so that the part "
                "cannot begin after its end and go on before it; give the steps in increasing order"
            )
    if seeds is not None and len(seeds) == len(run.tokens):
        settings["seeds"] = tuple(seeds[row] for row in rows)
    planned, rows_planned = run.planned, run.rows_planned and tuple(run.rows_planned[row] for row in rows)
    if rows_planned is not None and rows:
        if isinstance(steps := settings.get("steps"), tuple):
            own = tuple(steps[row] for row in rows)
            settings["steps"] = own if len(set(own)) > 1 else own[0]
        if len(set(rows_planned)) == 1 and not isinstance(settings.get("steps"), tuple):  # one plan again
            planned, rows_planned = rows_planned[0], None
    made = replace(
        run,
        canvases=run.canvases[[*chosen, run.steps]][:, rows],
        masked=run.masked[[*chosen, run.steps]][:, rows],
        proposals=run.proposals[chosen][:, rows],
        confidence=run.confidence[chosen][:, rows],
        unmasked=run.unmasked[chosen][:, rows],
        revised=run.revised[chosen][:, rows],
        attention_mask=run.attention_mask[rows],
        origins=_origins(run, [*chosen, run.steps], rows),
        rows_ran=None
        if whole and run.rows_ran is None
        else tuple(sum(step < ran[row] for step in chosen) for row in rows),
        joined_at=run.joined_at and tuple(run.joined_at[row] for row in rows),
        spans=tuple(run.spans[i] for i in chosen),
        blocks=tuple(run.blocks[i] for i in chosen),
        computed=tuple(run.computed[i] for i in chosen) if run.computed else (),
        settings=settings,
        planned=run.steps if planned is None and not whole else planned,
        rows_planned=rows_planned,
        part=None if whole else _place(run, chosen, rows),
        rows=run.rows if rows == list(range(len(run.tokens))) else tuple(run.row_numbers[row] for row in rows),
    )
    if run.origins is not None:
        _put_on_own_canvases(made, run, chosen, rows)
    return made


def _put_on_own_canvases(
    made: "DenoisingRun", run: "DenoisingRun", steps: Sequence[int], rows: Sequence[int]
) -> None:
    """What steps before gaps decide, rewrite, open and delete, at positions of their own canvases, into `made`."""
    gaps = [(place, step) for place, step in enumerate(steps) if not has_next(made, place)]
    for (place, step), (index, row) in product(gaps, enumerate(rows)):
        came, (tokens, opened) = came_by(run, row, step, step), canvas_after(run, row, step)
        new, again = changes_of_step(run, row, step)
        proposals, own = made.proposals[place, index], made.canvases[place, index]
        lost = made.unmasked[place, index] & ~new  # the token of another mask, or one that moved
        proposals[lost | again] = own[lost | again]
        taken = (came != NOWHERE) & (new | again)[came] & ~opened
        proposals[came[taken]] = tokens[taken]
        made.unmasked[place, index], made.revised[place, index] = new, again


def on_own_canvas(run: "DenoisingRun") -> "DenoisingRun":
    """A part of a joined run, whose rows began at one position, on the canvas that they ran on.

    Raises:
        ValueError: the rows began at several positions.
    """
    starts = set(run.joined_at or (0,))
    if len(starts) > 1:
        raise ValueError(f"rows that began at {sorted(starts)} have no canvas in common; take rows of one")
    start = starts.pop()
    names = ("canvases", "masked", "proposals", "confidence", "unmasked", "revised", "attention_mask")
    return replace(
        run,
        **{name: getattr(run, name)[..., start:] for name in names},
        prompt_length=run.prompt_length - start,
        spans=tuple((max(0, first - start), last - start) for first, last in run.spans),
        computed=tuple(span and (max(0, span[0] - start), span[1] - start) for span in run.computed),
        part=run.part and replace(run.part, answer=run.part.answer[..., start:]),
        joined_at=None,
        origins=None if run.origins is None else (run.origins[..., start:] - start).clamp(min=NOWHERE),
    )


def _origins(
    run: "DenoisingRun", canvases: Sequence[int], rows: Sequence[int]
) -> Int[Tensor, "step batch position"] | None:
    """Where everything on each of these canvases but the first was on the one before it."""
    if run.origins is None:
        return None
    found = [between(run.origins, start, stop)[list(rows)] for start, stop in pairwise(canvases)]
    return torch.stack(found) if found else run.origins[:0, list(rows)]


def _place(run: "DenoisingRun", steps: Sequence[int], rows: Sequence[int]) -> RunPart:
    return RunPart(
        tuple(run.step_numbers[step] for step in steps),
        tuple(run.block_numbers[step] for step in steps),
        answer_of(run, steps[0])[list(rows)] if steps else run.answer[list(rows)],
        tuple(run.steps_in_all[list(rows)].tolist()),
    )
