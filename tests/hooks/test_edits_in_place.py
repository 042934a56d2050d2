"""Hooks that edit their activation in place, as TransformerLens's do, act as those that return another tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import at_heads, at_layers, at_progress, at_steps, until_committed
from dlm_lens.testing import tiny

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8}


def third_head(site: str, kind: str) -> Any:
    """A hook that zeroes the head of index 2: in place, in place without a result, as a class, or in a copy."""

    def in_place(tensor: Tensor, hook: Any = None) -> Tensor | None:
        edited = tensor.clone() if kind == "copy" else tensor
        edited[(slice(None), 2) if site in ("scores", "pattern") else (slice(None), slice(None), 2)] = 0
        return None if kind == "none" else edited

    if kind == "class":

        @dataclass(frozen=True)
        class InPlace(Hook):
            def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
                in_place(tensor)
                return tensor

        InPlace.site = site
        return InPlace()
    in_place.site = site  # type: ignore[attr-defined]
    return in_place


def traced(model: Any, hook: Any, **settings: Any) -> Any:
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(PROMPTS, **settings) as tracer:
        for step in tracer.steps:
            for layer in lm.layers:
                layer.attn.apply(hook, step)
        run = tracer.result.save()
    return run


HOSTS: dict[str, Callable[..., Any]] = {
    "denoise": lambda model, hook, **settings: dl.denoise(model, PROMPTS, hooks=[hook], **settings),
    "bridge": lambda model, hook, **settings: dl.bridge(model).denoise(PROMPTS, hooks=[hook], **settings),
    "trace": traced,
}

STEPS = torch.arange(12).remainder(4).repeat(2, 1)
LIMITS: dict[str, Callable[[Any], Any]] = {
    "other head": lambda hook: at_heads(hook, [0]),
    "own head": lambda hook: at_heads(at_layers(at_steps(hook, [1, 2]), [1]), [2, -1]),
    "row": lambda hook: at_progress(hook, lambda progress: torch.arange(len(progress)) == 0),
    "head and row": lambda hook: at_heads(at_progress(hook, lambda p: torch.arange(len(p)) == 1), [2]),
    "positions": lambda hook: until_committed(hook, STEPS),
}


def same(found: Any, wanted: Any) -> bool:
    return found.tokens.equal(wanted.tokens) and torch.equal(
        found.confidence.nan_to_num(-1.0), wanted.confidence.nan_to_num(-1.0)
    )


@pytest.mark.parametrize("kind", ["function", "none", "class"])
@pytest.mark.parametrize("host", HOSTS)
def test_an_edit_in_place_stays_within_the_limit(host: str, kind: str) -> None:
    model, run = tiny("llada"), HOSTS[host]
    for site, name in (*(("z", name) for name in LIMITS), ("pattern", "head and row")):
        found = run(model, LIMITS[name](third_head(site, kind)), **SETTINGS)
        assert same(found, run(model, LIMITS[name](third_head(site, "copy")), **SETTINGS)), (site, name)
    plain = run(model, at_steps(third_head("z", "copy"), slice(0, 0)), **SETTINGS)
    assert same(run(model, at_heads(third_head("z", kind), [0]), **SETTINGS), plain)
    assert not same(run(model, at_heads(third_head("z", kind), [2]), **SETTINGS), plain)
