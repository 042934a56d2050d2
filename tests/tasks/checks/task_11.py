"""Keys that stand alone, and what hiding them changes."""

import functools
from typing import Any

import numpy as np
import torch

from tests.tasks.checks import comparing, loops

LENGTH, BLOCK, TIMES = 16, 8, 1.5


def alone(scores: loops.Floats) -> list[bool]:
    """Which key has more than 1.5 times the score of every other."""
    return [all(scores[j] > TIMES * scores[k] for k in range(len(scores)) if k != j) for j in range(len(scores))]


def hide_alone(scores: torch.Tensor) -> torch.Tensor:
    edited = scores.clone()
    for head, pattern in enumerate(scores[0].softmax(-1).numpy()):
        for key, one in enumerate(alone(loops.relative_scores(pattern))):
            if one:
                edited[0, head, :, key] = -torch.inf
    return edited


@functools.cache
def right() -> dict[str, Any]:
    model, edits = loops.loaded("toy"), {(layer, "scores"): hide_alone for layer in range(4)}
    has: dict[int, list[bool]] = {layer: [] for layer in range(4)}
    both, either, changed = 0, 0, []
    for text in loops.prompts()[:4]:
        canvases = loops.decode(model, text, LENGTH, BLOCK)[0]
        for found in loops.passes64(model, canvases[:LENGTH]):
            for layer in range(4):
                for pattern in loops.pattern_of(found, layer):
                    scores = loops.relative_scores(pattern)
                    mine, usual = alone(scores), loops.above_mean(scores)
                    has[layer].append(any(mine))
                    both += sum(a and b for a, b in zip(mine, usual, strict=True))
                    either += sum(a or b for a, b in zip(mine, usual, strict=True))
        hidden = loops.decode(
            model, text, LENGTH, BLOCK, lambda canvas, step: loops.pass64(model, canvas, edits=edits)["logits"]
        )[0]
        changed.append(int((canvases[-1] != hidden[-1]).sum()))
    return {
        "share": [float(np.mean(has[layer])) for layer in range(4)],
        "jaccard": float(both / either),
        "changed": changed,
    }


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.003)
