"""The patch in a trace, and by hook functions of the bridge."""

import functools
from typing import Any

import dlm_lens as dl
from tests.tasks.solutions import PROMPTS, toy

A, B, SETTINGS = PROMPTS[0], PROMPTS[2], {"gen_length": 16, "block_length": 16, "seed": 0}
LENGTH = 25

WRONG: tuple[dict[str, Any], ...] = (
    {"layer": 0},
    {"layer": 2},
    {"source": 2, "target": 6},
    {"source": 5},
    {"target": 3},
    {"everywhere": True},
)


def solve(layer: int = 1, source: int = 6, target: int = 2, everywhere: bool = False) -> dict[str, Any]:
    part = slice(None) if everywhere else slice(0, LENGTH)
    traced, logits = in_nnsight(layer, source, target, part)
    bridged, seen = on_the_bridge(layer, source, target, part)
    return {
        "plain": plain(),
        "nnsight": traced.answers[0],
        "transformerlens": bridged.answers[0],
        "probability_nnsight": surest(logits),
        "probability_transformerlens": surest(seen),
    }


@functools.cache
def plain() -> str:
    return str(dl.denoise(toy(), B, **SETTINGS).answers[0])


@functools.cache
def traceable() -> Any:
    return dl.DiffusionLM(dl.load("toy"))


@functools.cache
def bridged_model() -> Any:
    return dl.bridge(dl.load("toy"))


def surest(logits: Any) -> float:
    return float(logits[0, LENGTH:].double().softmax(-1).amax(-1).mean())


def in_nnsight(layer: int, source: int, target: int, part: slice) -> tuple[Any, Any]:
    lm = traceable()
    with lm.session():
        with lm.generate(A, **SETTINGS) as tracer:
            for step in tracer.steps[source]:  # noqa: B007
                donor = lm.layers[layer].output.clone()
        with lm.generate(B, **SETTINGS) as tracer:
            for step in tracer.steps[target]:  # noqa: B007
                lm.layers[layer].output[:, part] = donor[:, part]
                logits = lm.lm_head.output.save()
            run = tracer.result.save()
    return run, logits


def on_the_bridge(layer: int, source: int, target: int, part: slice) -> tuple[Any, Any]:
    tl, name, seen = bridged_model(), f"blocks.{layer}.hook_resid_post", {}
    _, cache = tl.denoise_with_cache(A, names_filter=name, cache_steps=[source], **SETTINGS)
    donor = cache[name, source]

    def patch(resid: Any, hook: Any) -> Any:
        if hook.step == target:
            resid[:, part] = donor[:, part]
        return resid

    def look(logits: Any, hook: Any) -> Any:
        if hook.step == target:
            seen["logits"] = logits.clone()
        return logits

    hooks = [(name, patch), ("unembed.hook_out", look)]
    return tl.denoise(B, fwd_hooks=hooks, **SETTINGS), seen["logits"]
