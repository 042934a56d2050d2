"""I-DLM: parity of the network, the released format, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import dlm_lens as dl
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN
from tests.adapters.test_sdlm import visible_to
from tests.reference import forward64

STORED = GOLDEN / "i_dlm"
TENSORS = load_file(STORED / "tensors.safetensors")


@torch.no_grad()
def test_the_network_is_qwen3s_causal_pass() -> None:
    model, ids = dl.load(STORED), TENSORS["ids"]
    assert type(model).__name__ == "IDLMModel"
    assert (model.config.mask_token_id, model.config.eos_token_id) == (90, 2)
    torch.testing.assert_close(model(ids).logits, TENSORS["logits"], **CLOSE)
    visible = visible_to([False] * ids.shape[1], 1)
    assert visible[0, 0].equal(torch.ones(15, 15).tril().bool())
    logits = forward64(model, ids, visible=visible)["logits"]
    torch.testing.assert_close(logits, TENSORS["logits"].double(), **CLOSE)
    # A mask changes nothing before it, and padding nothing at all.
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    found = model(padded, attention_mask=torch.tensor([[0] * 3 + [1] * 15])).logits[:, 3:]
    torch.testing.assert_close(found, TENSORS["logits"], **CLOSE)
    torch.testing.assert_close(model(ids[:, :10]).logits, TENSORS["logits"][:, :10], **CLOSE)


@torch.no_grad()
def test_a_cache_holds_what_the_whole_pass_computes() -> None:
    model, ids = dl.load(STORED), TENSORS["ids"]
    first = model(ids[:, :11], use_cache=True)
    rest = model(ids[:, 11:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, TENSORS["logits"][:, 11:], **CLOSE)


def released(tmp_path: Path, **changed: Any) -> dict[str, Tensor]:
    """A checkpoint as trained; of the vocabulary's real size few rows are used."""
    values: dict[str, Any] = json.loads((STORED / "config.json").read_text())
    values |= {"vocab_size": 151936, "mask_token_id": 151669, "eos_token_id": 151645} | changed
    weights = load_file(STORED / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(151936, weights[name].shape[1])
        rows[:97] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "modeling_sdar.py").write_text("raise RuntimeError('executed')")
    return weights


def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(tmp_path: Path) -> None:
    """config.json says sdar; the field of causal attention says which family it is."""
    weights = released(tmp_path)
    model = dl.load(tmp_path)
    config = model.config
    assert (config.mask_token_id, config.eos_token_id, config.eot_token_id) == (151669, 151645, 151645)
    assert config.rope_parameters["rope_theta"] == 1_000_000
    assert model.sampler_defaults == {
        "gen_length": 128, "stride": 4, "temperature": 1.0, "top_k": 50, "top_p": 0.95
    }  # fmt: skip
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    again, ids = dl.load(tmp_path / "again"), torch.tensor([[3, 5, 9, 151669, 151669]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)
    values = json.loads((tmp_path / "again" / "config.json").read_text())
    assert values["architectures"] == ["SDARForCausalLM"]
    assert values["use_regular_causal"] is True


def test_without_the_field_it_is_an_sdar_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    released(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["use_regular_causal"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert type(dl.load(tmp_path)).__name__ == "SDARModel"
    assert type(dl.load(tmp_path, family="i_dlm")).__name__ == "IDLMModel"
    values["use_regular_causal"] = False
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r'use_regular_causal is False.*load an SDAR with family="sdar"'):
        dl.load(tmp_path)
    assert type(dl.load(tmp_path, family="sdar")).__name__ == "SDARModel"


@torch.no_grad()
def test_it_has_hook_points_and_the_layers_of_qwen3() -> None:
    model = tiny("i_dlm", head_dim=8)
    check_hook_points(model)
    config = Qwen3Config(**{name: getattr(model.config, name) for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    )})  # fmt: skip
    plain = Qwen3ForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.tensor([[3, 9, 4, 11, 2, 7]])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, **CLOSE)
