"""Gradients of queries and keys before rotation, in a trace and by torch's own hooks."""

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import dlm_lens as dl
from dlm_lens.attention import add_hook_points
from dlm_lens.attention.hook_points import hooked_attentions
from dlm_lens.testing import tiny

IDS = [5, 9, 14, 3, 8]
FAMILIES = ["llada", "dream", "sink_qwen", "causal", "diffugpt", "bd3lm", "modernbert", "sdar", "heads first"]
STEP = 3e-3


def built(family: str) -> Any:
    """A tiny model; "heads first" is one of transformers that norms [batch, head, position, d_head]."""
    if family != "heads first":
        return tiny(family).double()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)).double().eval()
    add_hook_points(model)
    return model


def logit(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits
    return logits[0, -1, 3]


@pytest.mark.parametrize("site", ["q", "k"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_point_is_the_derivative(family: str, site: str) -> None:
    model = built(family)
    with torch.no_grad():
        plain = logit(model)
    point = getattr(hooked_attentions(model)[1], f"hook_{site}")
    kept: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = point.register_forward_hook(keep)
    found = logit(model)
    handle.remove()
    assert found.equal(plain)
    found.backward()
    gradient = kept[0].grad
    assert gradient is not None
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    sides = []
    for sign in (1, -1):
        handle = point.register_forward_hook(lambda _m, _i, value, sign=sign: value + sign * STEP * direction)
        with torch.no_grad():
            sides.append(float(logit(model)))
        handle.remove()
    # Central differences: the third derivative times 1e-5, and norms that round to float32, 1e-7 over 3e-3.
    difference = (sides[0] - sides[1]) / (2 * STEP)
    assert float((gradient * direction).sum()) == pytest.approx(difference, rel=3e-3, abs=3e-4)


def test_a_trace_has_the_gradient_of_queries_and_keys() -> None:
    model = tiny("llada").double()
    lm = dl.DiffusionLM(model)
    kept: dict[str, torch.Tensor] = {}

    def keeper(site: str) -> Any:
        def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            kept[site] = output

        return keep

    attention = hooked_attentions(model)[1]
    handles = [getattr(attention, f"hook_{site}").register_forward_hook(keeper(site)) for site in ("q", "k")]
    logit(model).backward()
    for handle in handles:
        handle.remove()
    with lm.trace(IDS):
        q, k = lm.layers[1].attn.q, lm.layers[1].attn.k
        chosen = lm.lm_head.output[0, -1, 3]
        with chosen.backward():
            of_k = k.grad.save()
            of_q = q.grad.save()
    torch.testing.assert_close(of_q, kept["q"].grad)
    torch.testing.assert_close(of_k, kept["k"].grad)


@pytest.mark.parametrize("site", ["q", "k", "v", "rot_k"])
@pytest.mark.parametrize("family", ["llada", "a2d_qwen3", "sdlm", "llada2"])
def test_an_invoke_has_the_gradient_that_its_prompt_has_alone(family: str, site: str) -> None:
    lm = dl.DiffusionLM(tiny(family).double())
    prompts, alone, together = [IDS, [7, 2, 11, 6, 13]], [], []
    for prompt in prompts:
        with lm.trace(prompt):
            value = getattr(lm.layers[1].attn, site)
            logit = lm.lm_head.output[0, -1, 3]
            with logit.backward():
                gradient = value.grad.save()
        alone.append(gradient)
    with lm.trace() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                value = getattr(lm.layers[1].attn, site)
                logit = lm.lm_head.output[0, -1, 3]
                with logit.backward(retain_graph=True):
                    gradient = value.grad
                together.append(gradient)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)
