"""Where tokens were at earlier steps of a run whose sampler inserts and deletes masks (DreamOn, LLaDA2.2)."""

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import sampler_class

if TYPE_CHECKING:
    from dlm_lens.sampling.denoising_run import DenoisingRun

NOWHERE = -1
"""The origin of a position that holds nothing that was there before: room for masks, or an inserted mask."""


def has_next(run: "DenoisingRun", step: int) -> bool:
    """Whether the next canvas of a run, or of a part of one, is what a step made of its own."""
    numbers = run.step_numbers
    return run.part is None or numbers[step + 1 : step + 2] == (numbers[step] + 1,)


def composed(
    one: Int[Tensor, "batch position"], following: Int[Tensor, "batch position"]
) -> Int[Tensor, "batch position"]:
    """The origins (`DenoisingRun.origins`) of two successive steps as those of one step."""
    return one.gather(-1, following.clamp(min=0)).masked_fill(following == NOWHERE, NOWHERE)


def between(origins: Int[Tensor, "step batch position"], start: int, stop: int) -> Int[Tensor, "batch position"]:
    """Where everything on the canvas of step `stop` was on that of step `start`."""
    where = torch.arange(origins.shape[-1], device=origins.device).expand(origins.shape[1:])
    *_, found = accumulate(origins[start:stop], composed, initial=where)
    return found


def came_from(run: "DenoisingRun", step: int) -> Int[Tensor, "canvas batch position"]:
    """Where everything on the canvases from that of a step on was on this first one; -1 where it was on none."""
    where = torch.arange(run.tokens.shape[-1], device="cpu").expand(run.tokens.shape)
    origins = where.expand(run.steps, *where.shape) if run.origins is None else run.origins
    return torch.stack(list(accumulate(origins[step:], composed, initial=where)))


def answer_of(run: "DenoisingRun", step: int) -> Bool[Tensor, "batch position"]:
    """The positions of the answer on the canvas of a step: all that hold no token of the prompt."""
    if run.origins is None:
        return run.answer
    before = between(run.origins, 0, step)
    return run.answer.gather(-1, before.clamp(min=0)) | (before == NOWHERE)


def answer_of_steps(run: "DenoisingRun") -> Bool[Tensor, "step batch position"]:
    """`answer_of` of every step."""
    if run.origins is None:
        return run.answer.expand(run.unmasked.shape)
    before = came_from(run, 0)[:-1]
    return run.answer.expand(before.shape).gather(-1, before.clamp(min=0)) | (before == NOWHERE)


def places_of(run: "DenoisingRun") -> Int[Tensor, "step_plus_one batch position"]:
    """Where the token of every position of the result was on each canvas; -1 where it was on none."""
    found = torch.arange(run.tokens.shape[-1], device="cpu").expand(run.tokens.shape)
    places = [found]
    if run.origins is not None:
        for origins in run.origins.flip(0):
            places.append(composed(origins, places[-1]))
    return torch.stack(places[::-1]) if run.origins is not None else found.expand(run.masked.shape)


def at_places(
    values: Shaped[Tensor, "step batch position"], places: Int[Tensor, "step batch position"], missing: float
) -> Shaped[Tensor, "step batch position"]:
    """What each step has at the places (`places_of`) of the result's tokens; `missing` where they were on none."""
    return values.gather(-1, places.clamp(min=0)).masked_fill(places == NOWHERE, missing)


def history_places(run: "DenoisingRun") -> Int[Tensor, "step_plus_one batch entry"]:
    """Where everything that a row's canvases ever held was on each of them; -1 where it was on none.

    The entries are in the order of the canvases, with what was deleted between its neighbours of then. What was
    moved stays one entry; a mask that became several goes on as the first of them. Room (DreamOn) is none. A row
    with fewer entries than another has further ones at its end, which were on no canvas.
    """
    if run.origins is None:
        return places_of(run)
    room = room_of_canvases(run)
    room = torch.zeros_like(run.masked) if room is None else room
    rows = [_row_history(run.origins[:, row], room[:, row]) for row in range(run.origins.shape[1])]
    most = max(places.shape[-1] for places in rows)
    padded = [torch.nn.functional.pad(each, (0, most - each.shape[-1]), value=NOWHERE) for each in rows]
    return torch.stack(padded, 1)


def _row_history(
    origins: Int[Tensor, "step position"], room: Bool[Tensor, "step_plus_one position"]
) -> Int[Tensor, "step_plus_one entry"]:
    entries = [NOWHERE if empty else position for position, empty in enumerate(room[0].tolist())]
    order, canvases = [entry for entry in entries if entry != NOWHERE], [entries]
    for came, empty in zip(origins.tolist(), room[1:].tolist(), strict=True):
        before, entries, end = entries, [], 0
        here: set[int] = set()
        for origin, is_room in zip(came, empty, strict=True):
            entry = NOWHERE if is_room or origin == NOWHERE else before[origin]
            if not is_room and (entry == NOWHERE or entry in here):
                entry = len(came) + len(order)  # no other entry has this number: `order` only grows
                order.insert(end, entry)
            if not is_room:
                end = order.index(entry, end) + 1  # a canvas keeps the order of what it held
            here.add(entry)
            entries.append(entry)
        canvases.append(entries)
    index = {entry: place for place, entry in enumerate(order)}
    places = torch.full((len(canvases), len(order)), NOWHERE)
    for step, canvas in enumerate(canvases):
        for position, entry in enumerate(canvas):
            if entry != NOWHERE:
                places[step, index[entry]] = position
    return places


def widened(
    origins: Int[Tensor, "step batch position"], *, before: int = 0, after: int = 0, steps: int = 0
) -> Int[Tensor, "more_steps batch wider"]:
    """Origins on a canvas with more positions before and after, and with more steps, at which nothing moves."""
    width = before + origins.shape[-1] + after
    moved = torch.where(origins == NOWHERE, NOWHERE, origins + before)
    where = torch.arange(width, device=origins.device).expand(*origins.shape[:2], width)
    found = torch.cat([where[..., :before], moved, where[..., width - after :]], -1)
    still = torch.where(found[-1:] == NOWHERE, NOWHERE, where[:1]) if len(found) else found
    return torch.cat([found, still.expand(steps if len(found) else 0, -1, -1)])


def on_canvases(
    run: "DenoisingRun", values: Shaped[Tensor, "*step batch position"], missing: float
) -> Shaped[Tensor, "step batch position"]:
    """Values of the result's positions (at each step) where their tokens were on the canvas of each step.

    Where a mask became several or was deleted later, no position of the result is its own: `missing`.
    """
    values = values.expand(run.unmasked.shape)
    if run.origins is None:
        return values
    places = run.token_places[:-1]
    known, where = places != NOWHERE, places.clamp(min=0)
    count = torch.zeros_like(places).scatter_add_(-1, where, known.long())
    own = known & (count.gather(-1, where) == 1)
    found = torch.full(places.shape, missing, dtype=values.dtype)
    step, row, position = own.nonzero(as_tuple=True)
    found[step, row, places[step, row, position]] = values[step, row, position]
    return found


def decisions_of(
    run: "DenoisingRun",
) -> tuple[Bool[Tensor, "step batch position"], Int[Tensor, "step batch position"]]:
    """The open positions of each step's canvas that it decides, and as which tokens; other entries mean nothing."""
    if run.origins is None:
        return run.unmasked, run.proposals
    step = torch.arange(run.steps, device="cpu")[:, None, None]
    wrote = at_places(run.canvases[1:], run.token_places[1:], 0)  # a later step may rewrite it
    return on_canvases(run, run.step_of, -1) == step, on_canvases(run, wrote, 0)


def open_in_text(
    masked: Bool[Tensor, "*step batch position"],
    answer: Bool[Tensor, "batch position"],
    room: Bool[Tensor, "*step batch position"],
) -> tuple[Int[Tensor, "*step batch"], Int[Tensor, "*step batch"]]:
    """How many positions of the answer's text are open on a canvas, and how many it has.

    Tokens of the prompt between two gaps may have moved to positions of the answer. They are never deleted, so that
    their number is that of the start.

    Args:
        masked: the open positions.
        answer: those that were open at the start.
        room: positions that are no text while they are open.
    """
    between_ends = (answer.cumsum(-1) > 0) & (answer.flip(-1).cumsum(-1).flip(-1) > 0)
    text = between_ends & ~(masked & room)
    return (masked & text).sum(-1), text.sum(-1) - (between_ends & ~answer).sum(-1)


def share_of_text(
    masked: Bool[Tensor, "batch position"],
    answer: Bool[Tensor, "batch position"],
    room: Bool[Tensor, "batch position"],
) -> Float[Tensor, "batch"]:
    """The share of the answer's text (`open_in_text`) that is decided."""
    opened, text = open_in_text(masked, answer, room)
    return 1 - opened.float() / text.clamp(min=1)


def room_of_canvases(run: "DenoisingRun") -> Bool[Tensor, "step_plus_one batch position"] | None:
    """The room of every canvas, the result's included; None in runs that have none."""
    sampler = sampler_class(run.settings)
    if not sampler.resizes:
        return None
    # Nothing proposes on the last canvas. Recordings of before have no origins; their runs end without masks.
    last = run.masked[-1:] if run.origins is None else run.masked[-1:] & (run.origins[-1:] == NOWHERE)
    if not run.steps:
        return torch.zeros_like(run.masked)
    before = sampler.room_of(run, slice(None))
    assert before is not None
    return torch.cat([before, last])


def followed(run: "DenoisingRun") -> "DenoisingRun":
    """A run with the positions of its result: what each step did where the token of a position was.

    A step unmasks what it decides, and revises what it rewrites or opens, but not what it moves. What was on no
    canvas of a step, because its mask was inserted later, is open there. Where the token of another mask came to a
    mask that stays open, the run does not hold what was proposed for it: nothing is.
    """
    if run.origins is None:
        return run
    places = run.token_places
    before, after = places[:-1], places[1:]
    held = run.canvases[run.masked]
    mask = int(held[0]) if len(held) else 0
    masked = at_places(run.masked, places, True)
    arrived = at_places(run.masked[:-1], after, True)
    # After the step, before what a caller's edit of the next canvas changes.
    left = torch.where(arrived, ~at_places(run.unmasked, after, False), masked[1:])
    canvases = at_places(run.canvases, places, mask)
    changed = at_places(run.revised, after, False) & (canvases[:-1] != canvases[1:])
    # Before a gap of a part (`part_of_run`) the changes are on the step's own canvas.
    gap = torch.tensor([not has_next(run, step) for step in range(run.steps)], device="cpu")[:, None, None]
    left = torch.where(gap, masked[:-1] & ~at_places(run.unmasked, before, False), left)
    changed = torch.where(gap, at_places(run.revised, before, False), changed)
    decided = masked[:-1] & ~left
    lost = masked[:-1] & ~decided & at_places(run.unmasked, before, False)
    proposals = torch.where(lost, mask, at_places(run.proposals, before, mask))
    return replace(
        run,
        canvases=canvases,
        masked=masked,
        proposals=torch.where(decided & ~gap, canvases[1:], proposals),
        confidence=at_places(run.confidence, before, -torch.inf),
        unmasked=decided,
        revised=~masked[:-1] & (left | changed),
        origins=None,
        part=run.part and replace(run.part, answer=at_places(run.answer[None], places[:1], True)[0]),
    )
