"""A bridge computes what the native model computes, and leaves that model alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import hooked_attentions
from tests.attention.test_hook_points import build
from tests.bridging.cases import CASES, CAUSAL, model_of, padded, some_ids
from tests.reference import forward64

DTYPES = [torch.float32, torch.bfloat16]


def native(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Logits with materialised patterns, as the bridge computes them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("hooked")
    # A listener makes a sink model materialise the sinks' own rows too, whose number shows in the last bits.
    points = [attention.hook_pattern for attention in hooked_attentions(model)]
    handles = [point.register_forward_hook(lambda *_: None) for point in points]
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    for handle in handles:
        handle.remove()
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_the_native_ones(case: str, dtype: torch.dtype) -> None:
    model, ids = model_of(case, dtype), some_ids()
    tl = dl.bridge(model)
    assert torch.equal(tl(ids), native(model, ids))
    assert torch.equal(tl(ids[:1, :9]), native(model, ids[:1, :9]))  # one row is another memory layout
    mask, positions = padded(ids)
    ours = tl(ids, attention_mask=mask)  # TransformerLens derives the positions itself
    theirs = native(model, ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_an_independent_network(case: str) -> None:
    model, ids = model_of(case), some_ids()
    want = forward64(model, ids, causal=case in CAUSAL)["logits"]
    # float32 through 2 layers of width 32 against float64
    torch.testing.assert_close(dl.bridge(model)(ids).double(), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_model_stays_as_it_was(case: str) -> None:
    model, ids = model_of(case), some_ids()
    before, weights = model(input_ids=ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    settings, kinds = model.config.to_dict(), [type(m) for m in model.modules()]
    tokenizer = (model.tokenizer.padding_side, model.tokenizer.bos_token, len(model.tokenizer))
    tl = dl.bridge(model)
    tl.run_with_cache(ids)
    assert torch.equal(model(input_ids=ids).logits, before)
    tl.enable_compatibility_mode(disable_warnings=True)
    tl(ids)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), [type(m) for m in model.modules()]) == (settings, kinds)
    assert (model.tokenizer.padding_side, model.tokenizer.bos_token, len(model.tokenizer)) == tokenizer


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_compatibility_mode_moves_weights_and_keeps_the_distribution(case: str) -> None:
    model, ids = model_of(case), some_ids()
    want = forward64(model, ids, causal=case in CAUSAL)["logits"].log_softmax(-1)
    tl = dl.bridge(model)
    tl.enable_compatibility_mode(disable_warnings=True)
    torch.testing.assert_close(tl(ids).double().log_softmax(-1), want, atol=2e-4, rtol=2e-4)
    assert torch.equal(tl.blocks[0].ln1.weight, torch.ones_like(tl.blocks[0].ln1.weight))
    assert torch.allclose(tl.W_U.mean(-1), torch.zeros(32), atol=1e-6)  # the unembedding is centred


def test_weights_are_shared_and_modules_are_not() -> None:
    model = model_of("sink")
    tl = dl.bridge(model)
    assert {p.data_ptr() for p in tl.original_model.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert not {id(m) for m in tl.original_model.modules()} & {id(m) for m in model.modules()}
    tl.enable_compatibility_mode(disable_warnings=True)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert tl.blocks[0].attn.q.original_component.weight.data_ptr() != model.get_parameter(q).data_ptr()


@torch.no_grad()
def test_hooks_of_the_model_stay_there() -> None:
    model, ids = model_of("llada"), some_ids()
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    tl = dl.bridge(model)
    tl(ids)
    assert not calls
    model(input_ids=ids)
    assert calls == [1]


def test_a_bridge_is_not_bridged_again_and_strangers_are_refused() -> None:
    tl = dl.bridge(model_of("llada"))
    with pytest.raises(ValueError, match="already carries a bridge"):
        dl.bridge(tl.original_model)
    with pytest.raises(ValueError, match=r"not loaded by dlm_lens\.load"):
        dl.bridge(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="dtype: options are for loading"):
        dl.bridge(model_of("llada"), dtype="bfloat16")


@pytest.mark.parametrize("model_type", ["gpt_neox", "gemma3_text", "mixtral", "olmo2", "olmoe"])
def test_a_model_of_another_layout_is_refused_by_type(model_type: str, tmp_path: Path) -> None:
    """In one sentence, without a line break, that names the type and what to use."""
    build(model_type).save_pretrained(tmp_path)
    model = dl.load(tmp_path)
    with pytest.raises(
        ValueError, match=f"layouts of Llama, Qwen2, Qwen3 and GPT-2, not a model of type '{model_type}'"
    ) as error:
        dl.bridge(model)
    said = "use dlm_lens.DiffusionLM or dlm_lens.denoise(hooks=...), or of an AR model TransformerLens's own"
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_dlm_cannot_do_is_refused() -> None:
    tl = dl.bridge(model_of("llada"))
    with pytest.raises(NotImplementedError, match="shifted causal loss"):
        tl(some_ids(), return_type="loss")
    with pytest.raises(NotImplementedError, match=r"use bridge\.denoise\(prompt\)"):
        tl.generate(some_ids(rows=1), max_new_tokens=2)
    with pytest.raises(NotImplementedError, match=r"use bridge\.denoise\(prompt\)"):
        tl.diffusion_generate(some_ids(rows=1))


@torch.no_grad()
def test_an_ar_baseline_generates_in_transformerlens() -> None:
    model = dl.load("toy-ar")
    prompt = torch.tensor([model.tokenizer("sort 4 2 9 1 :")["input_ids"]])
    want = dl.denoise(model, prompt, gen_length=5).tokens
    got = dl.bridge(model).generate(prompt, max_new_tokens=5, do_sample=False, verbose=False, return_type="tokens")
    assert torch.equal(got[:, : want.shape[1]], want)
