"""`DiffusionLM` over architectures of transformers that no family of ours is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import HOOK_POINTS, attention_blocks, hook_point, hooked_attentions
from dlm_lens.hooks import ablate, attach_hooks, mask_positions
from tests.adapters.small_architectures import small_model
from tests.attention.test_hook_points import build

IDS = [5, 9, 14, 3, 27]
KINDS = (
    "gpt2", "gpt_neox", "qwen3", "gemma2", "phi3", "opt", "gemma3_text", "gpt_oss", "qwen3_moe", "olmo3",
)  # fmt: skip
FUSED = ("gpt2", "gpt_neox", "phi3")


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A random model saved to a directory, and what `dl.load` makes of it."""
    path = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(path)
    return request.param, dl.load(path)


@torch.no_grad()
def own(model: Any, *modules: Any) -> list[Any]:
    """What modules return in a forward of the model itself, by forward hooks."""
    found: dict[int, Any] = {}
    handles = [module.register_forward_hook(lambda m, i, out: found.__setitem__(id(m), out)) for module in modules]
    model(torch.tensor([IDS]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[id(module)] for module in modules]


@torch.no_grad()
def test_names_lead_to_the_modules_of_every_architecture(loaded: tuple[str, Any]) -> None:
    kind, model = loaded
    lm: Any = dl.DiffusionLM(model)
    block, head = attention_blocks(model)[1], model.get_output_embeddings()
    assert len(lm.layers) == 3
    assert lm.layers[1]._module is block
    assert lm.embed._module is model.get_input_embeddings()
    assert lm.lm_head._module is head
    assert lm.layers[1].attn._module is hooked_attentions(model)[1]
    with lm.trace(IDS):
        embedded = lm.embed.output.save()
        attended = lm.layers[1].attn.output[0].save()
        added = lm.layers[1].mlp.output.save() if kind != "opt" else None
        resid = lm.layers[1].output.save()
        normed = lm.ln_final.output.save()
        logits = lm.lm_head.output.save()
    modules = [model.get_input_embeddings(), hooked_attentions(model)[1], block, head]
    expected = own(model, *modules)
    for got, wanted in zip((embedded, attended, resid, logits), expected, strict=True):
        assert torch.equal(got, wanted[0] if isinstance(wanted, tuple) else wanted)
    torch.testing.assert_close(torch.nn.functional.linear(normed, head.weight, head.bias), logits)
    if kind != "opt":
        (mlp,) = own(model, block.mlp)
        got, wanted = (each[0] if isinstance(each, tuple) else each for each in (added, mlp))
        assert torch.equal(got, wanted)


@torch.no_grad()
def test_every_point_of_a_trace_is_that_of_the_module(loaded: tuple[str, Any]) -> None:
    kind, model = loaded
    lm: Any = dl.DiffusionLM(model)
    attention = hooked_attentions(model)[1]
    absent = ("q", "k") if kind in FUSED else ()
    for name in HOOK_POINTS:
        if name in absent:
            have = "v, rot_q, rot_k, scores, pattern, z"
            sentence = f"{type(attention).__name__} has no hook point '{name}': it has {have}"
            with pytest.raises(ValueError, match=sentence), lm.trace(IDS):
                getattr(lm.layers[1].attn, name).save()
            with pytest.raises(ValueError, match=sentence), lm.trace(IDS):
                setattr(lm.layers[1].attn, name, torch.zeros(1))
            with pytest.raises(ValueError, match=sentence), lm.trace(IDS):
                lm.layers[1].attn.apply(ablate(name))
            assert f"({name}) ->" not in repr(lm.layers[1].attn)
            continue
        with lm.trace(IDS):
            value = getattr(lm.layers[1].attn, name).save()
        assert f"({name}) ->" in repr(lm.layers[1].attn)
        (expected,) = own(model, hook_point(attention, name))
        assert torch.equal(value, expected), name


@torch.no_grad()
def test_a_hook_at_every_site_does_what_it_does_outside_of_a_trace(loaded: tuple[str, Any]) -> None:
    kind, model = loaded
    lm: Any = dl.DiffusionLM(model)
    ids = torch.tensor([IDS])
    plain = model(ids, use_cache=False).logits
    sites = ["v", "z", "resid"] + ["q", "k"] * (kind not in FUSED) + ["attn_out", "mlp_out"] * (kind != "opt")
    hooks: list[Any] = [*map(ablate, sites), mask_positions(1), mask_positions(1, stage="after")]
    for hook in hooks:
        with lm.trace(IDS):
            lm.layers[1].attn.apply(hook)
            logits = lm.output.logits.save()
        with attach_hooks(model, hook, layers=[1]):
            expected = model(ids, use_cache=False).logits
        # Two kernels where columns are hidden: a trace forms the pattern.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert (logits - plain).abs().max() > 1e-3, hook
    if kind == "opt":
        sentence = "OPTDecoderLayer does not add the output of one module for attention and one for the MLP"
        with pytest.raises(ValueError, match=sentence), lm.trace(IDS):
            lm.layers[1].attn.apply(ablate("mlp_out"))


@torch.no_grad()
def test_a_run_has_the_steps_of_denoise(loaded: tuple[str, Any]) -> None:
    """Each step's pattern is that of a full forward pass over what is written so far."""
    _, model = loaded
    lm: Any = dl.DiffusionLM(model)
    plain = dl.denoise(model, IDS, steps=4, gen_length=4)
    with lm.generate(IDS, steps=4, gen_length=4) as tracer:
        patterns = [].save()
        for step in tracer.steps[1:]:
            patterns.append((int(step), lm.layers[0].attn.pattern.clone()))
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert [index for index, _ in patterns] == [1, 2, 3]
    for index, pattern in patterns:
        seen: list[Tensor] = []
        point = hook_point(hooked_attentions(model)[0], "pattern")
        handle = point.register_forward_hook(lambda m, i, value, seen=seen: seen.append(value))
        model(run.canvases[index][:, : len(IDS) + index], use_cache=False)
        handle.remove()
        width = pattern.shape[-1]  # a window of 8 keeps the last keys
        torch.testing.assert_close(pattern[:, :, -1], seen[0][:, :, -1, -width:], rtol=1e-4, atol=1e-5)


def test_a_hook_that_refuses_a_layer_is_refused_in_a_trace(loaded: tuple[str, Any]) -> None:
    model = loaded[1]
    lm: Any = dl.DiffusionLM(model, check=False)

    class Picky(dl.hooks.Hook):
        site = "resid"

        def check_layer(self, block: Any) -> None:
            raise ValueError(f"not into {type(block).__name__}")

    with pytest.raises(ValueError, match=f"not into {type(attention_blocks(model)[0]).__name__}"), lm.trace(IDS):
        lm.layers[1].attn.apply(Picky())


def test_a_layer_with_several_streams_refuses_a_hook_of_the_stream(tmp_path: Path) -> None:
    small_model("gemma3n_text").save_pretrained(tmp_path)
    lm: Any = dl.DiffusionLM(dl.load(tmp_path), check=False)
    with pytest.raises(ValueError, match="does not pass on the residual stream"), lm.trace(IDS):
        lm.layers[0].attn.apply(ablate("resid"))
