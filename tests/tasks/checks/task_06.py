"""Commitment and calibration, from the logits of a float64 network."""

import functools
from typing import Any

import numpy as np
import torch

from tests.tasks.checks import comparing, loops

LENGTH, STEPS, BINS = 24, (0, 8, 16), 10


@functools.cache
def right() -> dict[str, Any]:
    model = loops.loaded("toy")
    mask = model.config.mask_token_id
    leads, late = [], 0
    cases: dict[int, list[tuple[float, bool]]] = {step: [] for step in STEPS}
    for text in loops.prompts()[:8]:
        canvases, order = loops.decode(model, text, LENGTH, LENGTH)
        read = []
        for step, found in enumerate(loops.passes64(model, canvases[:LENGTH])):
            canvas, logits = canvases[step], found["logits"][0]
            logits[:, mask] = -torch.inf
            sure, token = logits.softmax(-1).max(-1)
            read.append(token)
            for position in range(canvas.shape[1]):
                if step in cases and int(canvas[0, position]) == mask:
                    cases[step].append((float(sure[position]), bool(token[position] == canvases[-1][0, position])))
        for decided, position in enumerate(order):
            committed = decided + 1
            while committed > 0 and read[committed - 1][position] == canvases[-1][0, position]:
                committed -= 1
            leads.append(decided - committed)
            late += committed > 0
    return {
        "mean_lead": float(np.mean(leads)),
        "late": int(late),
        "confidence": [float(np.mean([sure for sure, _ in cases[step]])) for step in STEPS],
        "accuracy": [float(np.mean([good for _, good in cases[step]])) for step in STEPS],
        "ece": [error(cases[step]) for step in STEPS],
    }


def error(cases: list[tuple[float, bool]]) -> float:
    """The expected calibration error."""
    total = 0.0
    for number in range(BINS):
        inside = [case for case in cases if min(int(case[0] * BINS), BINS - 1) == number]
        total += abs(sum(good - sure for sure, good in inside)) / len(cases)
    return total


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.002)
