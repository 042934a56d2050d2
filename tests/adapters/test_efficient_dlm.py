"""Efficient-DLM: parity of the network, its layout of blocks, and the released format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dlm_lens as dl
from dlm_lens.attention import BlockLayout, additive_mask, check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN
from tests.reference import forward64
from tests.sampling.test_efficient_dlm import visible_to

STORED = GOLDEN / "efficient_dlm"
TENSORS = load_file(STORED / "tensors.safetensors")


@torch.no_grad()
def test_the_network_is_the_original() -> None:
    model, ids = dl.load(STORED), TENSORS["ids"]
    assert type(model).__name__ == "EfficientDLMModel"
    torch.testing.assert_close(model(ids).logits, TENSORS["logits"], **CLOSE)
    torch.testing.assert_close(model.model(ids).last_hidden_state, TENSORS["hidden"], **CLOSE)
    torch.testing.assert_close(forward64(model, ids)["logits"], TENSORS["logits"].double(), **CLOSE)


@torch.no_grad()
def test_a_block_after_a_whole_context_is_the_original() -> None:
    model, ids = dl.load(STORED), TENSORS["ids"][:, :32]
    layout = BlockLayout(8, torch.tensor([24, 24]), "whole")
    visible = layout.visible(torch.ones_like(ids, dtype=torch.bool))
    assert visible[:1].equal(visible_to(24, 32, 8))
    logits = model(ids, attention_mask=additive_mask(visible, torch.float32)).logits
    torch.testing.assert_close(logits[:, 24:], TENSORS["block_logits"], **CLOSE)
    first, last = layout.bounds(layout.inside((24, 32), 32))
    assert first[0].tolist() == [0] * 24 + [24] * 8
    assert last[0].tolist() == [23] * 24 + [31] * 8


def released(tmp_path: Path, **changed: Any) -> dict[str, torch.Tensor]:
    """A checkpoint as on the hub; of the vocabulary's real size few rows are used."""
    values: dict[str, Any] = json.loads((STORED / "config.json").read_text())
    values |= {"mask_token_id": 151662, "vocab_size": 151936, "block_size": 32} | changed
    weights = load_file(STORED / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "diffusion_head.weight"):
        rows = torch.zeros(151936, weights[name].shape[1])
        rows[:97] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("modeling", "configuration"):
        (tmp_path / f"{name}_edlm.py").write_text("raise RuntimeError('executed')")
    return weights


def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(tmp_path: Path) -> None:
    """config.json says model_type qwen3, and which class it is."""
    weights = released(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    model = dl.load(tmp_path)
    config = model.config
    assert (config.mask_token_id, config.eos_token_id, config.eot_token_id) == (151662, 151643, 151645)
    assert config.rope_parameters["rope_theta"] == 1_000_000
    assert model.sampler_defaults["block_length"] == config.trained_block_length == 32
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    again, ids = dl.load(tmp_path / "again"), torch.tensor([[3, 5, 151662, 9]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)


def test_a_checkpoint_without_norms_is_refused(tmp_path: Path) -> None:
    released(tmp_path, disable_qk_norm=True)
    with pytest.raises(ValueError, match="every released Efficient-DLM has them"):
        dl.load(tmp_path)


def test_it_has_hook_points() -> None:
    model = tiny("efficient_dlm")
    check_hook_points(model)
    assert all(hasattr(layer.self_attn, "hook_q") for layer in model.model.layers)
