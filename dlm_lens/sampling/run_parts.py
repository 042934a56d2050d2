"""`RunPart` and `part_of_run`: some steps and rows of a run, which know their place in the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import algorithms

if TYPE_CHECKING:
    from dlm_lens.sampling.denoising_run import DenoisingRun


@dataclass(frozen=True)
class RunPart:
    """The place of a part's steps in the whole run, and what cannot be read from them.

    Args:
        numbers: the number of each step in the whole run.
        block_numbers: the number of each step among those of its block.
        answer: the positions that were open at the start of the whole run.
        rows_ran: after how many steps of the whole run each row was over; None if that is not known.
    """

    numbers: tuple[int, ...]
    block_numbers: tuple[int, ...]
    answer: Bool[Tensor, "batch position"]
    rows_ran: tuple[int, ...] | None = None


def sampler_class(run: "DenoisingRun") -> Any:
    """The class of the sampler of a run; None if the algorithm is not known here."""
    algorithm = algorithms().get(str(run.settings.get("sampler")))
    return None if algorithm is None else algorithm.sampler


def steps_of_rows(run: "DenoisingRun") -> Int[Tensor, "batch"]:
    """`DenoisingRun.row_steps`."""
    if run.rows_ran is not None:
        return torch.tensor(run.rows_ran, dtype=torch.long, device="cpu")
    ends = torch.tensor([*run.eos_token_ids, *_other_ends(run.settings)], dtype=torch.long, device="cpu")
    sampler = sampler_class(run)
    if run.autoregressive:
        wrote = run.unmasked & torch.isin(run.tokens, ends)
        ended, last = wrote.any(-1).any(0), wrote.any(-1).int().cumsum(0).eq(0).sum(0) + 1
    elif sampler is None or not sampler.ends_rows(run.settings):
        return torch.full((len(run.tokens),), run.steps, device="cpu")
    else:
        left, last = run.masked[-1], 1 + run.last_written.amax(-1)
        ended = (torch.isin(run.tokens, ends) & run.answer & ~left).any(-1) & left.any(-1) & (last > 0)
    return torch.where(ended, last, run.steps)


def _other_ends(settings: Mapping[str, Any]) -> list[int]:
    """The tokens that end a row by settings of its sampler (MMaDA's, SDAR's)."""
    given = [settings.get("eot_token"), settings.get("stop_tokens")]
    ids = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
    return [each for each in ids if isinstance(each, int) and not isinstance(each, bool)]


def in_own_blocks(run: "DenoisingRun") -> Bool[Tensor, "batch position"]:
    """The positions up to the end of each row's own last block, of samplers with `own_ends`; of others all."""
    sampler, layout = sampler_class(run), run.attention_blocks
    if sampler is None or layout is None or not sampler.own_ends:
        return torch.ones_like(run.attention_mask)
    last = run.prompt_length + int(run.settings["gen_length"]) - 1
    return layout.until_block_of(last, run.attention_mask.shape[1])


def part_of_run(run: "DenoisingRun", steps: Sequence[int] | None, rows: Sequence[int]) -> "DenoisingRun":
    """Some steps and rows of a run (None: all steps); the final canvas is kept.

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
        settings["steps"] = tuple(settings["steps"][row] for row in rows)
        if len({*zip(rows_planned, settings["steps"], strict=True)}) == 1:  # one plan again
            planned, rows_planned, settings["steps"] = rows_planned[0], None, settings["steps"][0]
    return replace(
        run,
        canvases=run.canvases[[*chosen, run.steps]][:, rows],
        masked=run.masked[[*chosen, run.steps]][:, rows],
        proposals=run.proposals[chosen][:, rows],
        confidence=run.confidence[chosen][:, rows],
        unmasked=run.unmasked[chosen][:, rows],
        revised=run.revised[chosen][:, rows],
        attention_mask=run.attention_mask[rows],
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
    )


def with_one_plan(run: "DenoisingRun") -> "DenoisingRun":
    """The run, whose rows were planned with one number of steps.

    Raises:
        ValueError: rows of a joined run that have several, naming them.
    """
    if run.rows_planned is not None:
        raise ValueError(
            f"the rows of this run were planned with {sorted(set(run.rows_planned))} steps in the batches that "
            "were joined, and a pass has one plan; take rows of one plan (recording.select(batch=...))"
        )
    return run


def place_in_plan(run: "DenoisingRun", step: int) -> tuple[int, int]:
    """The number of a step in the whole run, and how many were planned.

    Rows of a joined run may have had fewer steps planned than other rows ran. After those nothing of them is
    defined, and the last number stands for all.
    """
    if run.planned is None:
        return run.step_numbers[step], run.steps
    return min(run.step_numbers[step], run.planned - 1), run.planned


def own_canvas(run: "DenoisingRun") -> Bool[Tensor, "batch position"]:
    """The positions of each row's own canvas: all but those that joining padded it with."""
    starts = torch.tensor(run.joined_at or (0,) * len(run.tokens))
    return torch.arange(run.tokens.shape[1]) >= starts[:, None]


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
    )


def _place(run: "DenoisingRun", steps: Sequence[int], rows: Sequence[int]) -> RunPart:
    return RunPart(
        tuple(run.step_numbers[step] for step in steps),
        tuple(run.block_numbers[step] for step in steps),
        run.answer[list(rows)],
        tuple(run.steps_in_all[list(rows)].tolist()),
    )
