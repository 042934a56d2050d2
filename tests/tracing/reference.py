"""LLaDA's greedy loop in float64, written from the published description, with an edit at every place."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.reference import Edit, forward64

Edits = Callable[[int], Mapping[tuple[int, str], Edit]]


def run64(
    model: Any,
    ids: list[int],
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    edits: Edits | None = None,
    canvas: Callable[[int, Tensor], Tensor] | None = None,
    choose: Callable[[int, Tensor], Tensor] | None = None,
    force: Callable[[int, Tensor], Tensor] | None = None,
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Canvases [step + 1] of one row, and every intermediate of every step.

    `canvas` edits what a step starts from, `choose` the confidence [position], `force` says which masked positions
    are written.
    """
    mask_id, blocks = model.config.mask_token_id, gen_length // block_length
    each = steps // blocks
    x = torch.tensor([ids + [mask_id] * gen_length])
    canvases, kept = [], []
    for step in range(steps):
        if canvas is not None:
            x = canvas(step, x)
        canvases.append(x)
        masked = x[0] == mask_id
        found = forward64(model, x, edits=edits(step) if edits else None)
        kept.append(found)
        logits = found["logits"][0].clone()
        logits[:, mask_id] = -torch.inf
        token = logits.argmax(-1)
        confidence = found["logits"][0].softmax(-1)[torch.arange(x.shape[1]), token]
        if choose is not None:
            confidence = choose(step, confidence)
        stop = len(ids) + (step // each + 1) * block_length
        eligible = [j for j in range(stop) if masked[j]]
        count = -(-len(eligible) // (each - step % each))
        written = sorted(eligible, key=lambda j: (-float(confidence[j]), j))[:count]
        if force is not None:
            written = force(step, masked).nonzero().flatten().tolist()
        x = x.clone()
        for j in written:
            x[0, j] = token[j]
    canvases.append(x)
    return canvases, kept
