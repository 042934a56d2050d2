"""What transformers expects of a model class; its own common tests are run by tests/suites."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping

import dlm_lens
from dlm_lens.attention import decoder_of
from dlm_lens.testing import tiny

IDS = torch.arange(12).view(2, 6)
SINKS: list[tuple[str, dict[str, Any]]] = [
    ("smdm", {"num_sinks": 1}),
    ("sink_qwen", {"num_sinks": 3}),
    ("sink_llama", {"num_sinks": 2, "gated_attention": True}),
]


@pytest.mark.parametrize("family", ["llada", "dream", "smdm", "sink_qwen", "sink_llama", "diffugpt"])
def test_gradient_checkpointing_of_the_config_is_heeded(family: str):
    # GPT-2 drops out, at random, while it is trained.
    dropout = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "diffugpt" else ()
    plain = tiny(family, **dict.fromkeys(dropout, 0.0))
    config = copy.deepcopy(plain.config)
    config.gradient_checkpointing = True
    model = type(plain)(config).train()
    model.load_state_dict(plain.state_dict())
    layers = decoder_of(model).h if family == "diffugpt" else model.model.layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert "gradient_checkpointing" not in model.config.to_dict()
    calls: list[int] = []
    norm = layers[0].ln_1 if family == "diffugpt" else layers[0].input_layernorm
    norm.register_forward_hook(lambda *_: calls.append(0))
    for each in (plain.train(), model):
        each(input_ids=IDS, labels=IDS).loss.backward()
    assert len(calls) == 2  # once more in the backward pass
    gradients = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            weight.grad, gradients[name].grad, rtol=1e-5, atol=1e-7
        )  # float32, another order


@pytest.mark.parametrize(("family", "settings"), SINKS)
def test_sinks_that_a_checkpoint_lacks_are_drawn(family: str, settings: dict[str, Any]):
    config = tiny(family, hidden_size=512, head_dim=16, initializer_range=0.25, **settings).config
    model_class = type(tiny(family, **settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [model_class.from_pretrained(None, config=copy.deepcopy(config), state_dict={}) for _ in range(2)]
    first, second = (model.model.embed_tokens.sinks for model in drawn)
    assert first.shape == (settings["num_sinks"], 512)
    assert float(first.detach().std()) == pytest.approx(0.25, rel=0.15)  # 4 standard errors of 512 numbers
    assert not first.equal(second)


def test_sink_logits_that_a_checkpoint_lacks_are_zero():
    plain = tiny("sink_qwen", softmax="sink_logits")
    weights = {name: value for name, value in plain.state_dict().items() if not name.endswith("sink_logits")}
    model = type(plain).from_pretrained(None, config=copy.deepcopy(plain.config), state_dict=weights)
    for layer in model.model.layers:
        assert layer.self_attn.sink_logits.equal(torch.zeros(4))


@pytest.mark.parametrize("settings", [{}, {"num_sinks": 1}, {"gated_attention": True}], ids=str)
@pytest.mark.parametrize("original", [True, False])
def test_smdm_loads_under_the_files_names_and_under_the_models(tmp_path: Path, settings: Any, original: bool):
    model = tiny("smdm", **settings)
    model.save_pretrained(tmp_path, save_original_format=original)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
    assert ("transformer.h.0.attn.attn.weight" in names) is original
    assert ("model.layers.0.self_attn.q_proj.weight" in names) is not original
    gate = "transformer.h.1.attn.gate.weight" if original else "model.layers.1.self_attn.gate_proj.weight"
    assert (gate in names) is bool(settings.get("gated_attention"))
    loaded = dlm_lens.load(tmp_path, mask_token_id=64)
    for name, value in model.state_dict().items():
        assert loaded.state_dict()[name].equal(value), name


@pytest.mark.parametrize("family", ["llada", "smdm"])
def test_every_renaming_matches_a_saved_name(family: str, tmp_path: Path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = list(held.keys())
    for each in get_model_conversion_mapping(model, add_legacy=False):
        used = any(each.compiled_sources.search(name) for name in names)
        assert used or each.source_patterns == [r"attn\.gate"], each  # no gate here
