"""Received attention with planted sinks: the truth first, then scores that show it."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from dlm_lens.sinks import Received

SINK, EVEN = 12.0, 0.9


@dataclass(frozen=True)
class Plan:
    """Spells (position, first step, last step) of one pattern, and what they must be read as."""

    spells: tuple[tuple[int, int, int], ...]
    kind: str
    moves: tuple[tuple[int, int], ...] = ()  # (from, to), positions
    switches: tuple[int, ...] = ()  # steps


def static(steps, keys, at=3):
    return Plan(((at % keys, 0, steps - 1),), "static")


def moving(steps, keys, dwell, by, start):
    """One sink that stays `dwell` steps and goes on by `by` positions, around the canvas."""
    spells = [((start + by * n) % keys, t, min(t + dwell, steps) - 1) for n, t in enumerate(range(0, steps, dwell))]
    moves = tuple((a[0], b[0]) for a, b in pairwise(spells))
    longest = max(last - first + 1 for _, first, last in spells)
    return Plan(tuple(spells), "static" if longest >= 0.9 * steps else "moving", moves)


def one_step(steps, keys):
    return Plan(((keys // 2, steps // 2, steps // 2),), "static")


def coexisting(steps, keys):
    """Two sinks that stay on; which is larger changes every third step."""
    return Plan(
        ((1, 0, steps - 1), (keys - 2, 0, steps - 1)),
        "static",
        (),
        tuple(t for t in range(3, steps, 3) if t < steps),
    )


def nothing(steps, keys):
    return Plan((), "none")


def plans(steps, keys):
    """One plan per (layer, head) of a 2 x 4 model."""
    return [
        static(steps, keys),
        moving(steps, keys, dwell=4, by=2, start=0),
        moving(steps, keys, dwell=3, by=-3, start=keys - 1),
        moving(steps, keys, dwell=1, by=5, start=2),
        one_step(steps, keys),
        coexisting(steps, keys),
        nothing(steps, keys),
        moving(steps, keys, dwell=steps, by=1, start=5),
    ]


def truth(plan, steps, keys):
    """[step, key]: on or not."""
    on = torch.zeros(steps, keys, dtype=torch.bool)
    for position, first, last in plan.spells:
        on[first : last + 1, position] = True
    return on


def scores_of(plan, steps, keys, generator):
    scores = EVEN * torch.rand(steps, keys, generator=generator)
    for number, (position, first, last) in enumerate(plan.spells):
        for step in range(first, last + 1):
            # The spells of a plan with switches take turns at being larger.
            lead = 2.0 if plan.switches and (step // 3) % 2 == number else 0.0
            scores[step, position] = SINK + lead
    return scores


def planted(steps, keys, batch=2, noise=0.0, seed=0, dtype=torch.float32):
    """A `Received` of 2 layers x 4 heads whose pattern (row, layer, head) follows plan (layer * 4 + head)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = plans(steps, keys)
    values = torch.stack(
        [torch.stack([scores_of(plan, steps, keys, generator) for plan in chosen], 1) for _ in range(batch)], 1
    )
    values = values + noise * torch.randn(values.shape, generator=generator)
    received = Received(
        values=values.unflatten(2, (2, 4)).to(dtype),
        expected=torch.ones(steps, batch, 1, 1, keys),
        counted=torch.full((steps, batch), keys),
        layers=(10, 11),
    )
    return received, chosen
