"""Hooks that edit their activation in place, as TransformerLens's do, act as those that return another tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import at_heads, at_layers, at_progress, at_steps, attach_hooks, until_committed
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
    plain = run(model, at_steps(third_head("z", "copy"), slice(99, None)), **SETTINGS)
    assert same(run(model, at_heads(third_head("z", kind), [0]), **SETTINGS), plain)
    assert not same(run(model, at_heads(third_head("z", kind), [2]), **SETTINGS), plain)


def halved(site: str, *, copy: bool) -> Any:
    """A hook that halves the first head, in place or in a copy."""

    def halve(tensor: Tensor, hook: Any = None) -> Tensor:
        edited = tensor.clone() if copy else tensor
        edited[:, :, 0] *= 0.5
        return edited

    halve.site = site  # type: ignore[attr-defined]
    return halve


CACHED: dict[str, Any] = {"steps": 8, "gen_length": 8, "block_length": 4}


@pytest.mark.parametrize("site", ["v", "rot_k"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_what_a_cache_keeps_is_what_was_before_an_edit_in_place(cache: str, site: str) -> None:
    model = tiny("llada")
    settings = {**CACHED, "cache": cache}
    plain = dl.denoise(model, PROMPTS, **settings)
    for limited in (lambda hook: hook, lambda hook: at_layers(at_steps(hook, [0]), [1])):
        runs = [
            dl.denoise(model, PROMPTS, hooks=[limited(halved(site, copy=copy))], **settings)
            for copy in (False, True)
        ]
        assert same(*runs)
        assert not same(runs[0], plain)


@pytest.mark.parametrize("site", ["v", "rot_k"])
def test_what_a_cache_keeps_is_what_was_before_an_edit_in_place_of_a_trace(site: str) -> None:
    lm = dl.DiffusionLM(tiny("llada"), check=False)

    def run(*, copy: bool) -> Any:
        with lm.generate(PROMPTS, **CACHED, cache="prefix") as tracer:
            for _ in tracer.steps[[0]]:
                if copy:
                    value = getattr(lm.layers[1].attn, site).clone()
                    value[:, :, 0] = 0
                    setattr(lm.layers[1].attn, site, value)
                else:
                    getattr(lm.layers[1].attn, site)[:, :, 0] = 0
            done = tracer.result.save()
        return done

    assert same(run(copy=False), run(copy=True))


@pytest.mark.parametrize("site", ["v", "rot_k"])
def test_a_cache_of_transformers_keeps_what_was_before_an_edit_in_place(site: str) -> None:
    model = tiny("causal", model_type="llama")
    ids = torch.tensor(PROMPTS)
    kept, edited, logits = [], [], []
    for copy in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            with attach_hooks(model, halved(site, copy=copy)):
                model(ids[:, :3], past_key_values=cache, use_cache=True)
                edited.append(model(ids[:, 3:], past_key_values=cache, use_cache=True).logits)
            kept.append([(layer.keys, layer.values) for layer in cache.layers])
            logits.append(model(ids[:, :1], past_key_values=cache, use_cache=True).logits)
    assert edited[0].equal(edited[1])
    assert logits[0].equal(logits[1])
    for (keys, values), (other_keys, other_values) in zip(*kept, strict=True):
        assert keys.equal(other_keys)
        assert values.equal(other_values)


def test_keys_and_values_are_copied_only_where_something_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copies = tiny("llada"), []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda tensor, **options: copies.append(1) or clone(tensor, **options))
    layers, ids = len(dl.attention.hooked_attentions(model)), torch.tensor(PROMPTS)
    for hooks, per_layer in (([], 0), ([halved("z", copy=False)], 0), ([halved("v", copy=False)], 1)):
        copies.clear()
        with torch.no_grad(), attach_hooks(model, *hooks):
            model(ids)
        assert len(copies) == per_layer * layers
