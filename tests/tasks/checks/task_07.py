"""Attention of a block's queries in block diffusion, from a float64 network with a block-causal mask."""

import functools
from typing import Any

import numpy as np
import torch

from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.tasks.checks import comparing, loops

PROMPTS = ("w3 w9 w21 w4 w17 w30 w8 w12", "w5 w50 w2 w33 w41 w7 w19 w26", "w11 w6 w44 w1 w39 w28 w15 w3")
LENGTH, BLOCK, LAYERS, HEADS = 12, 4, 2, 4


@functools.cache
@torch.no_grad()
def right() -> dict[str, Any]:
    model = tiny("sdar", seed=3)
    shares: dict[int, list[float]] = {layer: [] for layer in range(LAYERS)}
    inside: dict[int, list[bool]] = {layer: [] for layer in range(LAYERS)}
    recalls, chances = [], []
    for text in PROMPTS:
        for sums in blocks_of(model, text):
            start = sums.shape[-1] - BLOCK
            top = round(0.25 * start)
            for step, layer, head in np.ndindex(*sums.shape[:3]):
                received = sums[step, layer, head]
                shares[layer].append(float(received[:start].sum() / received.sum()))
                inside[layer].append(int(received.argmax()) < start)
                if step > 0:
                    early = set(np.argsort(-sums[0, layer, head, :start])[:top].tolist())
                    now = set(np.argsort(-received[:start])[:top].tolist())
                    recalls.append(len(early & now) / top)
            chances += [top / start] * (len(sums) - 1)
    return {
        "prefix_share": [float(np.mean(shares[layer])) for layer in range(LAYERS)],
        "largest_in_prefix": [float(np.mean(inside[layer])) for layer in range(LAYERS)],
        "recall": float(np.mean(recalls)),
        "chance": float(np.mean(chances)),
    }


def blocks_of(model: Any, text: str) -> list[loops.Floats]:
    """Per block, what each key receives from the block's queries: [step, layer, head, key]."""
    ids, mask = loops.ids_of(model, text), model.config.mask_token_id
    found = []
    for _ in range(LENGTH // BLOCK):
        start = len(ids)
        ids, steps = ids + [mask] * BLOCK, []
        number = torch.arange(len(ids)) // BLOCK
        visible = (number[None, :] <= number[:, None])[None, None]
        while mask in ids:
            one = forward64(model, torch.tensor([ids]), visible=visible)
            steps.append([one[f"pattern{layer}"][0, :, start:].sum(1).numpy() for layer in range(LAYERS)])
            write(model, ids, one["logits"][0], start)
        found.append(np.array(steps))
    return found


def write(model: Any, ids: list[int], logits: torch.Tensor, start: int) -> None:
    """SDAR's default: every open position above 0.85, and at least the surest."""
    mask = model.config.mask_token_id
    logits[:, mask] = -torch.inf
    sure, token = logits.softmax(-1).max(-1)
    left = [position for position in range(start, len(ids)) if ids[position] == mask]
    best = max(left, key=lambda position: float(sure[position]))
    for position in left:
        if position == best or sure[position] > 0.85:
            ids[position] = int(token[position])


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.002)
