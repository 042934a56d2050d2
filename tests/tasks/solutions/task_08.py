"""Captured states, a steering hook, and a replay on fixed canvases."""

import functools
from typing import Any

import dlm_lens as dl
from dlm_lens.hooks import at_layers, capture, steer
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = (
    {"scale": 1.0},
    {"scale": -2.0},
    {"layer": 2},
    {"positions": None},
    {"late": 11},
    {"shift": 1},
)


@functools.cache
def denoised(first: int, end: int) -> Any:
    return dl.denoise(toy(), PROMPTS[first:end], gen_length=16, block_length=16, seed=0)


def solve(
    scale: float = 2.0, layer: int = 1, positions: str | None = "masked", late: int = 12, shift: int = 0
) -> dict[str, Any]:
    model, run, fresh = toy(), denoised(0, 4), denoised(8, 10)
    kept = capture(model, run, "resid", cache_steps=[4, late], layers=[layer])
    means = {step: kept["resid", layer, step][run.masked[step]].mean(0) for step in (4, late)}
    direction = means[late] - means[4]
    push = at_layers(steer(direction, scale, positions=positions), [layer])
    replayed = dl.replay(model, fresh, [push], attention=False)
    kl, flipped = [], []
    for step in (4 + shift, 8 + shift):
        is_open = fresh.masked[step]
        kl.append(float(replayed.kl[step][is_open].double().mean()))
        flipped.append(float(replayed.flipped[step][is_open].double().mean()))
    return {"length": float(direction.norm()), "kl": kl, "flipped": flipped}
