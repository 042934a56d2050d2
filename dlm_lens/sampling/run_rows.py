"""What the rows of a run do not share: their prompts, after how many steps each is over, blocks, canvas and plan.

Rows of a batch may end at different steps, and rows of joined runs began on canvases and with plans of their own.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.moved_tokens import open_in_text, room_of_canvases

if TYPE_CHECKING:
    from dlm_lens.attention import Hook
    from dlm_lens.sampling.denoising_run import DenoisingRun


def steps_of_rows(run: "DenoisingRun") -> Int[Tensor, "batch"]:
    """`DenoisingRun.row_steps`."""
    if run.rows_ran is not None:
        return torch.tensor(run.rows_ran, dtype=torch.long, device="cpu")
    ends = torch.tensor([*run.eos_token_ids, *_other_ends(run.settings)], dtype=torch.long, device="cpu")
    sampler = sampler_class(run.settings)
    if run.autoregressive:
        wrote = run.unmasked & torch.isin(run.tokens, ends)
        ended, last = wrote.any(-1).any(0), wrote.any(-1).int().cumsum(0).eq(0).sum(0) + 1
    elif not sampler.ends_rows(run.settings):
        return torch.full((len(run.tokens),), run.steps, device="cpu")
    else:
        left, last = run.masked[-1], 1 + run.last_written.amax(-1)
        ended = (torch.isin(run.tokens, ends) & run.answer & ~left).any(-1) & left.any(-1) & (last > 0)
    return torch.where(ended, last, run.steps)


def steps_with_work(run: "DenoisingRun") -> Bool[Tensor, "step batch"]:
    """The steps that each row has alone: until it is over, without those at which it waits for others of its batch.

    Where how many steps a block takes depends on its tokens (`Sampler.rows_wait`), a row waits whose block has no
    open position left. Of samplers that rewrite decided positions no stored canvas tells when a row is done with a
    block: all steps until its end count.
    """
    from dlm_lens.sampling.samplers.base import Sampler  # here, because that module imports this one

    sampler = sampler_class(run.settings)
    edits = sampler.editable is not Sampler.editable
    if edits or run.autoregressive or not sampler.rows_wait(run.settings):
        return run.running
    return run.running & (run.in_block & run.open[: run.steps]).any(-1)


def _other_ends(settings: Mapping[str, Any]) -> list[int]:
    """The tokens that end a row by settings of its sampler (MMaDA's, SDAR's)."""
    given = [settings.get("eot_token"), settings.get("stop_tokens")]
    ids = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
    return [each for each in ids if isinstance(each, int) and not isinstance(each, bool)]


def decided_answer(run: "DenoisingRun") -> Bool[Tensor, "batch position"]:
    """The positions of the answer that are decided at the end, and that each row decided before it was over.

    An AR row is written on while others of its batch go on, and DiffusionGemma closes the later canvases of a row
    that has ended: neither is a decision of the row. A part of a run does not hold what its other steps decided: in
    it a closed position counts up to its row's end.
    """
    run = run.by_token
    last = run.last_written
    decided = run.answer & ~run.open[-1] & (last < run.row_steps[:, None])
    return decided & (last >= 0 if run.part is None else until_ends(run))


def until_ends(run: "DenoisingRun") -> Bool[Tensor, "batch position"]:
    """The positions up to each row's end, where a row that is over is closed or written on; in other runs all.

    In AR decoding those of the steps that the row ran; with `Sampler.closes_rows` (DiffusionGemma) those up to the
    end of the block that holds an end of its text.
    """
    width = run.tokens.shape[1]
    if run.autoregressive:
        return torch.arange(width, device="cpu") < run.prompt_length + run.steps_in_all[:, None]
    layout = run.attention.blocks
    quirks = bool(run.settings.get("reference_quirks"))  # with these the row is denoised on
    if not sampler_class(run.settings).closes_rows or layout is None or quirks:
        return torch.ones_like(run.attention_mask)
    ends = torch.isin(run.tokens, torch.tensor(run.eos_token_ids, dtype=torch.long, device="cpu")) & run.answer
    block = layout.numbers(width).expand_as(ends)
    return block <= block.masked_fill(~ends, width).amin(-1, keepdim=True)


def open_and_planned(
    run: "DenoisingRun", answer: Bool[Tensor, "batch position"]
) -> tuple[Int[Tensor, "step_plus_one batch"], Int[Tensor, "step_plus_one batch"]]:
    """How many positions of each row's planned answer are open on every canvas, and how many it has there.

    Where a sampler inserts and deletes masks, the answer is as long as it is on that canvas, without room.

    A run that ends with its text may lack positions that were planned (`Sampler.final_length`). They are open, as
    beside a longer row. Where open positions hold random tokens, those of a row that is over are decided: padding.

    Args:
        run: whole or a part.
        answer: the positions of the answer on its canvases.
    """
    if (room := room_of_canvases(run)) is not None:
        return open_in_text(run.masked, answer, room)
    opened, lacking = (run.masked & answer).sum(-1), _lacking(run)
    if bool(lacking.any()):
        left = torch.ones_like(opened, dtype=torch.bool)
        if run.uniform_noise:
            left = torch.cat([run.running, torch.zeros_like(left[:1])]) | (opened > 0)
        opened = opened + left * lacking
    return opened, (answer.sum(-1) + lacking).expand_as(opened)


def _lacking(run: "DenoisingRun") -> Int[Tensor, "batch"]:
    """How many positions of each row's planned answer come after the end of its canvas."""
    from dlm_lens.sampling.samplers.base import Sampler  # here, because that module imports this one

    sampler = sampler_class(run.settings)
    whole = sampler.final_length is Sampler.final_length
    if whole or run.autoregressive or "gen_length" not in run.settings:
        return torch.zeros(len(run.tokens), dtype=torch.long, device="cpu")
    again, length = sampler.for_rerun(run.settings), int(run.settings["gen_length"])
    content = run.attention_mask[:, : run.prompt_length]
    # Joined rows each by itself: they had batches of their own, which no stored run tells.
    alone = [torch.ones(1, size, dtype=torch.bool, device="cpu") for size in content.sum(-1).tolist()]
    batches = alone if run.joined_at is not None else [content] * len(alone)
    planned = [again.answer_length(batch, length) for batch in batches]
    where = torch.arange(1, run.tokens.shape[1] + 1, device="cpu")
    stops = (run.attention_mask * where).amax(-1)  # joining pads shorter canvases on the right
    return (run.prompt_length + torch.tensor(planned, dtype=torch.long, device="cpu") - stops).clamp(min=0)


def has_one_plan(run: "DenoisingRun", hooks: Sequence["Hook"]) -> bool:
    """Whether one plan says all of every row: they have it in common, or the plans differ in their length alone.

    Of the length depends what hooks do that are not `stateless`, such as under `at_steps(hook, -1)`.
    """
    in_length = not isinstance(run.settings.get("steps"), tuple) and all(hook.stateless for hook in hooks)
    return run.rows_planned is None or in_length


def with_one_plan(run: "DenoisingRun", hooks: Sequence["Hook"]) -> "DenoisingRun":
    """The run, whose rows have one plan under these hooks (`has_one_plan`).

    Raises:
        ValueError: rows of a joined run that have several, naming them.
    """
    if not has_one_plan(run, hooks):
        assert run.rows_planned is not None
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
    starts = torch.tensor(run.joined_at or (0,) * len(run.tokens), device="cpu")
    return torch.arange(run.tokens.shape[1], device="cpu") >= starts[:, None]


def prompts_of_rows(run: "DenoisingRun") -> list[tuple[int, ...]]:
    """The tokens of every row's prompt."""
    content = run.attention_mask & run.in_own_blocks & ~run.answer
    return [tuple(run.canvases[0, row][content[row]].tolist()) for row in range(len(run.tokens))]


def first_places(run: "DenoisingRun") -> Bool[Tensor, "batch position"]:
    """The positions of each row's prompt, with the [MASK]s that it fills in, on the first canvas of a whole run.

    Where a sampler inserts masks (`Sampler.resizes`), their room is between a gap and the rest of the prompt.
    """
    before = run.attention_mask & (torch.arange(run.tokens.shape[1], device="cpu") < run.prompt_length)
    room = sampler_class(run.settings).room_of(run, 0) if run.steps else None
    if room is None:
        return before
    with_gap = (run.answer & before & ~room).any(-1, keepdim=True)
    return torch.where(with_gap, run.attention_mask & ~room, before)


def first_prompt(run: "DenoisingRun", row: int) -> Int[Tensor, "prompt"]:
    """The tokens that a row of a whole run was made from, with the [MASK]s that it fills in (`first_places`)."""
    return run.canvases[0, row][first_places(run)[row]]


def prompt_numbers(runs: Sequence["DenoisingRun"]) -> list[Int[Tensor, "batch"]]:
    """Run by run the number of each row's prompt, counted from 0 as they come; equal prompts have one number.

    A row without a prompt, or with special tokens alone, is drawn like no other, and has a number of its own.
    """
    found: dict[Any, int] = {}
    numbers = []
    for place, run in enumerate(runs):
        special = {*run.eos_token_ids, *getattr(run.tokenizer, "all_special_ids", ())}
        prompts = enumerate(prompts_of_rows(run))
        keys = [(place, row) if special.issuperset(prompt) else (prompt,) for row, prompt in prompts]
        numbers.append([found.setdefault(key, len(found)) for key in keys])
    return [torch.tensor(each, dtype=torch.long, device="cpu") for each in numbers]
