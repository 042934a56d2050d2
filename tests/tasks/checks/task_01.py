"""Moves of sinks in layer 2: onset, hysteresis and links, one position at a time."""

import functools
from typing import Any

import numpy as np

from tests.tasks.checks import comparing, loops

STEPS, LAYER, HEADS = 32, 2, 4


@functools.cache
def right() -> dict[str, Any]:
    model = loops.loaded("toy")
    moves = []
    for prompt, text in enumerate(loops.prompts()[:4]):
        canvases, _ = loops.decode(model, text, STEPS, 8)
        scores = np.stack(
            [
                [loops.relative_scores(pattern) for pattern in loops.pattern_of(found, LAYER)]
                for found in loops.passes64(model, canvases[:STEPS])
            ]
        )
        for head in range(HEADS):
            for step, before, after in moves_of(scores[:, head]):
                moves.append({"prompt": prompt, "head": head, "step": step, "from": before, "to": after})
    moves = [move for move in moves if 5 <= move["step"] <= 20]
    moves.sort(key=lambda move: (move["prompt"], move["head"], move["step"], move["to"]))
    return {"heads": sorted({move["head"] for move in moves}), "moves": moves}


def moves_of(scores: loops.Floats) -> list[tuple[int, int, int]]:
    """(step of the new sink, old position, new position) of one head's scores [step, key]."""
    enters = [loops.above_mean(one) for one in scores]
    holds = [loops.above_mean(one, 2.25) for one in scores]
    lives = []
    for position in range(scores.shape[1]):
        since = None
        for step in range(len(scores) + 1):
            on = False
            if step < len(scores):
                on = enters[step][position] or (since is not None and holds[step][position])
            if on and since is None:
                since = step
            if not on and since is not None:
                lives.append((position, since, step - 1))
                since = None
    pairs = []
    for old in lives:
        for new in lives:
            observed = old[2] < len(scores) - 1 and new[1] > 0
            later = new[1] > old[1] and new[2] > old[2]
            delay = new[1] - (old[2] + 1)
            if observed and later and abs(delay) <= 1 and old[0] != new[0]:
                pairs.append((abs(delay), abs(new[0] - old[0]), delay, old, new))
    taken: list[tuple[int, int, int]] = []
    used_old, used_new = set(), set()
    for _, _, _, old, new in sorted(pairs):
        if old not in used_old and new not in used_new:
            used_old.add(old)
            used_new.add(new)
            taken.append((new[1], old[0], new[0]))
    return taken


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.0)
