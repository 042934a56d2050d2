"""The logit lens at the largest sink of every step."""

import functools
from typing import Any

import dlm_lens as dl
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = ({"head": 2}, {"lens_layer": 1}, {"lens_layer": 3}, {"shift": 1})


@functools.cache
def found() -> tuple[Any, Any]:
    run = dl.denoise(toy(), PROMPTS[8], gen_length=16, block_length=16, seed=0)
    return run, dl.find_sinks(dl.received_over_steps(toy(), run), dl.AboveMean(3.0))


def solve(head: int = 3, lens_layer: int = 2, shift: int = 0) -> dict[str, Any]:
    model = toy()
    run, sinks = found()
    positions = sinks.main()[:, 0, 2, head].tolist()
    answer: dict[str, Any] = {"position": positions, "token": [], "probability": []}
    for step, position in enumerate(positions):
        token, probability = None, None
        if position >= 0:
            at = min(step + shift, run.steps - 1)
            lens = dl.logit_lens(model, run, positions=[position], steps=[at], layers=[lens_layer], top=1)
            line = lens.table().iloc[0]
            token, probability = line["top"][0], float(line["probability"])
        answer["token"].append(token)
        answer["probability"].append(probability)
    return answer
