"""SDLM: parity of the network, which query sees which key, the released format, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import check_hook_points, in_window, sees_window, until_window
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN
from tests.reference import forward64

STORED = GOLDEN / "sdlm"
TENSORS = load_file(STORED / "tensors.safetensors")


def visible_to(masked: list[bool], length: int) -> Tensor:
    """Causal, and the window from the position before the first mask on sees itself; entry by entry."""
    positions = len(masked)
    start = (masked.index(True) if any(masked) else positions) - 1
    window = range(max(start, 0), min(start + length, positions))
    found = torch.zeros(positions, positions, dtype=torch.bool)
    for query in range(positions):
        for key in range(positions):
            found[query, key] = key <= query or (query in window and key in window)
    return found[None, None]


@torch.no_grad()
def test_the_network_is_the_original() -> None:
    model = dl.load(STORED, family="sdlm")
    assert type(model).__name__ == "SDLMModel"
    assert model.config.mask_token_id == 90
    for name in ("", "clean_"):
        ids = TENSORS["clean" if name else "ids"]
        torch.testing.assert_close(model(ids).logits, TENSORS[f"{name}logits"], **CLOSE)
        visible = visible_to((ids[0] == 90).tolist(), 4)
        logits = forward64(model, ids, visible=visible)["logits"]
        torch.testing.assert_close(logits, TENSORS[f"{name}logits"].double(), **CLOSE)


@pytest.mark.parametrize("masks", [(), (3,), (3, 4, 5), (3, 4, 5, 6, 7), (0, 1), (6, 7), (7,), (2, 5, 6)])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_who_sees_whom(masks: tuple[int, ...], length: int) -> None:
    padding, positions = 2, 8
    masked = torch.zeros(1, padding + positions, dtype=torch.bool)
    masked[0, [padding + place for place in masks]] = True
    content = torch.arange(padding + positions)[None] >= padding
    visible = sees_window(content, masked, length)
    want = visible_to(masked[0, padding:].tolist(), length)
    assert visible[..., padding:, padding:].equal(want)
    assert not visible[..., :padding].any()
    start = (masks[0] if masks else positions) - 1
    where = torch.arange(positions)
    assert in_window(content, masked, length)[0, padding:].equal((where >= start) & (where < start + length))
    assert until_window(content, masked, length)[0, padding:].equal(where < start + length)


@torch.no_grad()
def test_a_cache_holds_what_the_whole_pass_computes() -> None:
    model, ids = dl.load(STORED, family="sdlm"), TENSORS["ids"]
    whole = model(ids).logits
    first = model(ids[:, :20], use_cache=True)
    rest = model(ids[:, 20:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 20:], **CLOSE)
    with pytest.raises(ValueError, match="SDLMDecoder attends in an order that depends on which ids are"):
        model(inputs_embeds=model.get_input_embeddings()(ids))


def released(tmp_path: Path, **changed: Any) -> dict[str, Tensor]:
    """A checkpoint as trained; of the vocabulary's real size few rows are used."""
    values: dict[str, Any] = json.loads((STORED / "config.json").read_text())
    values |= {"vocab_size": 151936, "text_mask_token_id": 151665} | changed
    weights = load_file(STORED / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(151936, weights[name].shape[1])
        rows[:97] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "modeling_qwen2.py").write_text("raise RuntimeError('executed')")
    return weights


def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(tmp_path: Path) -> None:
    """config.json says qwen2; the field of the mask says which family it is."""
    weights = released(tmp_path)
    model = dl.load(tmp_path)
    config = model.config
    assert (config.mask_token_id, config.eos_token_id) == (151665, 2)
    assert config.mask_window == config.block_size == 4
    # The window of a run is that of the training, 8 in SDLM-3B-D8.
    assert model.sampler_defaults["window_length"] == 4
    assert tiny("sdlm", block_size=8).sampler_defaults["window_length"] == 8
    assert config.rope_parameters["rope_theta"] == 1_000_000
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    again, ids = dl.load(tmp_path / "again"), torch.tensor([[3, 5, 9, 151665, 151665]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["text_mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert type(dl.load(tmp_path)).__name__ == "Qwen2ForCausalLM"
    assert dl.load(tmp_path, family="sdlm").config.mask_token_id == 151665


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"causal_attn": True}, "causal_attn is True"), ({"block_size": 1}, "block_size is 1; the window is")],
)
def test_other_windows_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    released(tmp_path, **changed)
    with pytest.raises(ValueError, match=message):
        dl.load(tmp_path, family="sdlm")


def test_it_has_hook_points() -> None:
    model = tiny("sdlm")
    check_hook_points(model)
    assert all(hasattr(layer.self_attn, "hook_q") for layer in model.model.layers)
