"""The logit lens at a head's largest sink, from the weights."""

import functools
from typing import Any

import torch

from tests.reference import normed
from tests.tasks.checks import comparing, loops

LAYER, HEAD, LENGTH = 2, 3, 16


@functools.cache
@torch.no_grad()
def right() -> dict[str, list[Any]]:
    model = loops.loaded("toy")
    weights = model.state_dict()
    scale, head = weights["model.norm.weight"].double(), weights["lm_head.weight"].double()
    answer: dict[str, list[Any]] = {"position": [], "token": [], "probability": []}
    for found in loops.passes64(model, loops.decode(model, loops.prompts()[8], LENGTH, LENGTH)[0][:LENGTH]):
        scores = loops.relative_scores(loops.pattern_of(found, LAYER)[HEAD])
        position = loops.strongest(scores, loops.above_mean(scores))
        token, probability = None, None
        if position >= 0:
            stream = found[f"resid{LAYER}"][0, position]
            likely = (normed(stream, scale, model.config.rms_norm_eps) @ head.T).softmax(-1)
            token = model.tokenizer.convert_ids_to_tokens(int(likely.argmax()))
            probability = float(likely.max())
        answer["position"].append(position)
        answer["token"].append(token)
        answer["probability"].append(probability)
    return answer


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.002)
