"""Chains of masked texts in a float64 network, with and without every head's strongest column."""

import functools
from typing import Any

import torch

from tests.tasks.checks import comparing, loops

ANSWERS = ("18 + 2 = 20 . 20 + 5 = 25 . answer 25 .", "18 + 2 = 20 . 20 + 5 = 24 . answer 24 .")


def hide_strongest(scores: torch.Tensor) -> torch.Tensor:
    edited = scores.clone()
    for head, pattern in enumerate(scores[0].softmax(-1).numpy()):
        received = loops.relative_scores(pattern)
        edited[0, head, :, loops.strongest(received, [True] * len(received))] = -torch.inf
    return edited


@functools.cache
@torch.no_grad()
def right() -> dict[str, Any]:
    model = loops.loaded("toy")
    start = loops.ids_of(model, loops.prompts()[5])
    found: dict[str, Any] = {}
    for name, edits in (("plain", None), ("hidden", {(layer, "scores"): hide_strongest for layer in range(4)})):
        values = []
        for text in ANSWERS:
            answer = model.tokenizer(text, add_special_tokens=False).input_ids
            total = 0.0
            for place, token in enumerate(answer):
                rest = [model.config.mask_token_id] * (len(answer) - place)
                canvas = torch.tensor([start + answer[:place] + rest])
                logits = loops.pass64(model, canvas, edits=edits)["logits"][0, len(start) + place]
                total += float(logits.log_softmax(-1)[token])
            values.append(total)
        found[name] = values
        found[f"margin_{name}"] = values[0] - values[1]
    return found


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.02, 0.005)
