"""Positions of hooks under transformers' caches, outside runs: passes with a cache equal those without."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, StaticCache

import dlm_lens as dl
from dlm_lens.attention import attach_hooks, check_hook_points
from dlm_lens.hooks import ablate, mask_positions, scale_attention, steer, zero_value
from tests.adapters.small_architectures import small_model

IDS = torch.tensor([[5, 9, 14, 3, 77, 20, 41, 8, 60, 22]])
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
# float32 with other kernels; logits are of order 10.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def causal(model_type: str, **values: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **values})).eval()
    check_hook_points(dl.add_hook_points(model))
    return model


def generated(model: Any, ids: Tensor, *hooks: Any, cache: bool) -> Tensor:
    """Logits of the tokens that `generate` writes under the hooks."""
    with attach_hooks(model, *hooks):
        out = model.generate(
            ids,
            max_new_tokens=6,
            do_sample=False,
            use_cache=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(out.logits)


def check_generated(model: Any, hook: Any) -> None:
    """Generation with a cache gives the logits of generation without one, and the hook acts."""
    expected = generated(model, IDS, hook, cache=False)
    torch.testing.assert_close(generated(model, IDS, hook, cache=True), expected, **CLOSE)
    assert not torch.allclose(expected[0], generated(model, IDS, cache=False)[0], **CLOSE)


SITES = ["q", "k", "v", "z", "attn_out", "mlp_out", "resid"]


@pytest.mark.parametrize("position", [1, 8])
@pytest.mark.parametrize("site", SITES)
def test_a_position_is_the_same_with_a_cache(site: Any, position: int) -> None:
    check_generated(causal("llama"), ablate(site, positions=[position]))


@pytest.mark.parametrize(
    "hook", [steer(torch.arange(64.0), positions=[0, 8]), scale_attention([1, 8], 3.0)], ids=repr
)
@pytest.mark.parametrize("model_type", ["gpt_neox", "cohere", "qwen3"])
def test_architectures_name_their_cache_differently(model_type: str, hook: Any) -> None:
    check_generated(causal(model_type), hook)


@pytest.mark.parametrize("site", ["q", "k", "z", "attn_out", "mlp_out", "resid"])
def test_a_pass_without_the_position_is_left_as_it_is(site: Any) -> None:
    model, logits = causal("llama"), []
    for position in (None, 8, 9):
        with torch.no_grad():
            model(IDS[:, :9], past_key_values=(cache := DynamicCache(config=model.config)))
            with attach_hooks(model, *([] if position is None else [ablate(site, positions=[position])])):
                logits.append(model(IDS[:, 9:], past_key_values=cache).logits)
    plain, before, own = logits
    assert plain.equal(before)
    assert not plain.equal(own)


def test_a_position_after_the_pass_is_not_there() -> None:
    model = causal("llama")
    with torch.no_grad():
        model(IDS[:, :4], past_key_values=(cache := DynamicCache(config=model.config)))
        with (
            attach_hooks(model, ablate("resid", positions=[6])),
            pytest.raises(ValueError, match="position 6 is not there; the model has 5 canvas positions"),
        ):
            model(IDS[:, 4:5], past_key_values=cache)


@pytest.mark.parametrize("position", [1, -2])
def test_a_static_cache_has_room_after_the_last_position(position: int) -> None:
    model, logits = causal("llama"), []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        with torch.no_grad():
            model(IDS[:, :8], past_key_values=cache)
            with attach_hooks(model, zero_value(position), ablate("z", positions=[position])):
                logits.append(model(IDS[:, 8:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.parametrize("site", ["q", "v", "z"])
def test_layers_that_share_keys_and_values(site: Any) -> None:
    model = dl.add_hook_points(small_model("gemma3n_text"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
        with attach_hooks(model, ablate(site, positions=[1])):
            whole = model(IDS[:, :8], use_cache=False).logits
            model(IDS[:, :7], past_key_values=(cache := DynamicCache(config=model.config)))
            last = model(IDS[:, 7:8], past_key_values=cache).logits
    torch.testing.assert_close(last, whole[:, -1:], **CLOSE)


@pytest.mark.parametrize("hook", [zero_value(0), ablate("z", positions=[0])], ids=repr)
def test_an_encoder_decoder(hook: Any) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "t5", d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0,
        eos_token_id=None, initializer_factor=2.0,
    )  # fmt: skip
    model = dl.add_hook_points(AutoModelForSeq2SeqLM.from_config(config).eval())
    check_generated(model, hook)


OF_KEYS = [
    mask_positions(1, 7),
    mask_positions(6, 8, stage="after"),
    zero_value(1, 8),
    scale_attention([1, 8], 3.0),
    scale_attention([1, 8], 3.0, stage="after"),
]
WINDOWED = {
    "mistral": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("hook", OF_KEYS, ids=repr)
@pytest.mark.parametrize("model_type", WINDOWED)
def test_a_key_is_the_same_where_a_cache_keeps_a_window(model_type: str, hook: Any) -> None:
    check_generated(causal(model_type, sliding_window=4, **WINDOWED[model_type]), hook)


@pytest.mark.parametrize("hook", [mask_positions(1), zero_value(1), scale_attention([1], 3.0)], ids=repr)
@pytest.mark.parametrize("whole", [False, True], ids=["window", "whole"])
def test_a_key_that_the_window_has_left_changes_nothing(whole: bool, hook: Any) -> None:
    model, logits = causal("mistral", sliding_window=4), []
    for hooks in ([], [hook]):
        cache = DynamicCache() if whole else DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS, past_key_values=cache)
            with attach_hooks(model, *hooks):
                logits.append(model(IDS[:, :1], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, **CLOSE)
