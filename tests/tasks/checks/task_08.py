"""A direction of time from states of a float64 network, and its effect on fixed canvases."""

import functools
from typing import Any

import numpy as np
import torch

from tests.tasks.checks import comparing, loops

LENGTH, LAYER, STEPS = 16, 1, (4, 8)


@functools.cache
@torch.no_grad()
def right() -> dict[str, Any]:
    model = loops.loaded("toy")
    mask = model.config.mask_token_id
    states: dict[int, list[torch.Tensor]] = {4: [], 12: []}
    for text in loops.prompts()[:4]:
        canvases = loops.decode(model, text, LENGTH, LENGTH)[0]
        for step, kept in states.items():
            stream = loops.pass64(model, canvases[step])[f"resid{LAYER}"][0]
            kept.extend(stream[canvases[step][0] == mask])
    direction = torch.stack(states[12]).mean(0) - torch.stack(states[4]).mean(0)
    kls: dict[int, list[float]] = {step: [] for step in STEPS}
    flips: dict[int, list[bool]] = {step: [] for step in STEPS}
    for text in loops.prompts()[8:10]:
        canvases = loops.decode(model, text, LENGTH, LENGTH)[0]
        for step in STEPS:
            is_open = canvases[step][0] == mask

            def push(stream: torch.Tensor, is_open: torch.Tensor = is_open) -> torch.Tensor:
                return torch.where(is_open[None, :, None], stream + 2 * direction, stream)

            plain = loops.pass64(model, canvases[step])["logits"][0]
            pushed = loops.pass64(model, canvases[step], edits={(LAYER, "resid"): push})["logits"][0]
            for position in is_open.nonzero()[:, 0].tolist():
                kls[step].append(loops.kl(plain[position], pushed[position]))
                both = torch.stack([plain[position], pushed[position]])
                both[:, mask] = -torch.inf
                flips[step].append(bool(both[0].argmax() != both[1].argmax()))
    return {
        "length": float(direction.norm()),
        "kl": [float(np.mean(kls[step])) for step in STEPS],
        "flipped": [float(np.mean(flips[step])) for step in STEPS],
    }


def check(answer: dict[str, Any]) -> list[str]:
    flipped = {"flipped": right()["flipped"]}
    rest = {name: right()[name] for name in ("length", "kl")}
    return comparing.differences(answer, rest, 0.001, 0.01) + comparing.differences(answer, flipped, 0.001)
