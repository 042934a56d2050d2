"""Stable-DiffCoder: parity of the network under its blocks, and the released format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dlm_lens as dl
from dlm_lens.adapters.registry import model_type_of
from dlm_lens.attention import BlockLayout, additive_mask, check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN
from tests.reference import forward64

STORED = GOLDEN / "stable_diffcoder"
TENSORS = load_file(STORED / "tensors.safetensors")


@torch.no_grad()
def test_the_network_under_block_causal_attention_is_the_original() -> None:
    model, ids = dl.load(STORED, mask_token_id=90), TENSORS["ids"]
    assert type(model).__name__ == "StableDiffCoderModel"
    visible = BlockLayout(4, torch.zeros(2, dtype=torch.long)).visible(torch.ones_like(ids, dtype=torch.bool))
    block = torch.arange(30) // 4
    assert visible[0, 0].equal(block[None] <= block[:, None])
    mask = additive_mask(visible, torch.float32)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, TENSORS["logits"], **CLOSE)
    hidden = model.model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(hidden, TENSORS["hidden"], **CLOSE)
    logits = forward64(model, ids, visible=visible)["logits"]
    torch.testing.assert_close(logits, TENSORS["logits"].double(), **CLOSE)


def released(tmp_path: Path, architecture: str) -> dict[str, torch.Tensor]:
    """A checkpoint as on the hub; of the vocabulary's real size few rows are used."""
    values: dict[str, Any] = json.loads((STORED / "config.json").read_text())
    values |= {"vocab_size": 155136, "architectures": [architecture]}
    weights = load_file(STORED / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(155136, weights[name].shape[1])
        rows[:97] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "modeling_stable_diffcoder.py").write_text("raise RuntimeError('executed')")
    return weights


@pytest.mark.parametrize("architecture", ["StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"])
def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(architecture: str, tmp_path: Path) -> None:
    """config.json says model_type llama, and which class it is."""
    weights = released(tmp_path, architecture)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    model = dl.load(tmp_path)
    config = model.config
    assert config.model_type == "stable_diffcoder"
    assert (config.mask_token_id, config.eos_token_id, config.bos_token_id) == (5, 2, 0)
    assert config.rope_parameters["rope_theta"] == 500_000
    assert model.sampler_defaults["block_length"] == config.trained_block_length == 4
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    again, ids = dl.load(tmp_path / "again"), torch.tensor([[3, 5, 5, 9]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)


def test_a_plain_llama_is_not_taken_for_it() -> None:
    values = json.loads((STORED / "config.json").read_text())
    assert model_type_of(values | {"architectures": ["LlamaForCausalLM"]}, "somewhere") == "llama"


def test_it_has_hook_points() -> None:
    model = tiny("stable_diffcoder")
    check_hook_points(model)
    assert all(hasattr(layer.self_attn, "hook_q") for layer in model.model.layers)
