"""Nemotron-Labs-Diffusion: parity of both readings of the weights, the training's masks, and released formats."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.families.nemotron_labs_diffusion import NemotronLabsDiffusionConfig
from dlm_lens.attention import BlockLayout, additive_mask, check_hook_points
from dlm_lens.sampling.two_copies import two_copies
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN
from tests.reference import forward64
from tests.sampling.test_nemotron_labs_diffusion import visible_to

STORED = GOLDEN / "nemotron_labs_diffusion"
TENSORS = load_file(STORED / "tensors.safetensors")
LOSSES = json.loads((STORED / "sampling.json").read_text())["losses"]
# Logits have a standard deviation of 4.4; the authors' float32 differs from their float64 by 7.4e-5.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.mark.parametrize("kind", ["8b", "3b"])
@torch.no_grad()
def test_both_readings_are_the_originals(kind: str) -> None:
    """With YaRN of the factors 16 and 0.25, and queries that are scaled from position 16 on."""
    ids = TENSORS[f"{kind}.ids"]
    model, ar = dl.load(STORED / kind), dl.load(STORED / kind, family="causal")
    torch.testing.assert_close(model(ids).logits, TENSORS[f"{kind}.logits"], **CLOSE)
    torch.testing.assert_close(model.model(ids).last_hidden_state, TENSORS[f"{kind}.hidden"], **CLOSE)
    torch.testing.assert_close(ar(ids).logits, TENSORS[f"{kind}.causal_logits"], **CLOSE)
    torch.testing.assert_close(forward64(model, ids)["logits"], TENSORS[f"{kind}.logits"].double(), **CLOSE)
    causal = forward64(ar, ids, causal=True)["logits"]
    torch.testing.assert_close(causal, TENSORS[f"{kind}.causal_logits"].double(), **CLOSE)
    assert (TENSORS[f"{kind}.logits"] - TENSORS[f"{kind}.causal_logits"]).abs().max() > 5


@torch.no_grad()
def test_a_block_after_a_causal_context_is_the_original() -> None:
    ids, model = TENSORS["8b.ids"][:, :32], dl.load(STORED / "8b")
    layout = BlockLayout(8, torch.tensor([24, 24]), context="causal")
    visible = layout.visible(torch.ones_like(ids, dtype=torch.bool))
    assert visible[:1].equal(visible_to(32, 24))
    logits = model(ids, attention_mask=additive_mask(visible, torch.float32)).logits
    torch.testing.assert_close(logits[:, 24:], TENSORS["8b.block_logits"], **CLOSE)


@torch.no_grad()
def test_the_training_pass_is_the_original() -> None:
    """[x_t, x_0] under the authors' mask, in blocks of 8 from the text's start, and their two losses."""
    model, clean, noisy = dl.load(STORED / "8b"), TENSORS["8b.train_clean"], TENSORS["8b.train_noisy"]
    blocks, positions = torch.arange(40).expand(2, -1) // 8, torch.arange(40).expand(2, -1)
    inputs = two_copies(noisy, clean, blocks, positions, dtype=torch.float32, causal=True)
    logits = model(**inputs).logits
    torch.testing.assert_close(logits[:, :40], TENSORS["8b.train_logits"], **CLOSE)
    torch.testing.assert_close(logits[:, 40:], TENSORS["8b.train_causal_logits"], **CLOSE)
    masked, stored = TENSORS["8b.train_masked"].bool(), LOSSES["block_diff"]
    losses = -logits[:, :40].double().log_softmax(-1).gather(-1, clean[..., None])[..., 0]
    rate = torch.tensor(stored["p_mask"]).double()[:, None].expand(-1, 40)
    total = float((losses / rate)[masked].sum())
    assert total == pytest.approx(stored["diffusion_sum_over_p_mask"], rel=1e-5)
    following = -logits[:, 40:-1].double().log_softmax(-1).gather(-1, clean[:, 1:, None])
    assert float(following.sum()) == pytest.approx(stored["ar_sum"], rel=1e-5)


def layout_by_hand(positions: int, start: int) -> Tensor:
    """A causal context and a block from `start` on, entry by entry."""
    found = torch.zeros(positions, positions, dtype=torch.bool)
    for query in range(positions):
        for key in range(positions):
            found[query, key] = key <= query or (query >= start and key >= start)
    return found


@pytest.mark.parametrize(
    ("positions", "starts"), [(9, [6, 7]), (8, [6, 7]), (7, [6, 4]), (10, [9, 7]), (5, [3, 4])]
)
def test_the_last_block_of_the_canvas_is_the_one_that_sees_itself(positions: int, starts: list[int]) -> None:
    layout = BlockLayout(3, torch.tensor([3, 4]), context="causal")
    content = torch.ones(2, positions, dtype=torch.bool)
    for row, start in enumerate(starts):
        assert layout.visible(content)[row, 0].equal(layout_by_hand(positions, start))
        assert (
            layout.to(torch.device("cpu"))
            .repeated(2)
            .visible(content.repeat(2, 1))[2 + row, 0]
            .equal(layout_by_hand(positions, start))
        )


def test_bounds_of_positions_are_their_own_before_the_block() -> None:
    layout = BlockLayout(3, torch.tensor([3]), context="causal")
    first, last = layout.bounds(layout.inside((6, 9), 11)[None])
    assert first.tolist() == [[[0, 1, 2, 3, 4, 5, 6, 6, 6, 9, 10]]]
    assert last.tolist() == [[[0, 1, 2, 3, 4, 5, 8, 8, 8, 9, 10]]]
    first, last = layout.bounds(layout.inside((6, 7), 11))
    assert first.tolist() == last.tolist() == [list(range(11))]


RELEASED = {
    "3b": {"max_position_embeddings": 4096, "factor": 0.25, "eos_token_id": 2},
    "8b": {"max_position_embeddings": 262144, "factor": 16.0, "eos_token_id": 11},
}


@pytest.mark.parametrize("kind", ["8b", "3b"])
def test_a_checkpoint_in_the_released_format_loads_and_is_written_back(kind: str, tmp_path: Path) -> None:
    """config.json as on the hub; of the vocabulary's real size few rows are used."""
    values = json.loads((STORED / kind / "config.json").read_text())
    released = dict(RELEASED[kind])
    values["rope_parameters"] |= {"original_max_position_embeddings": 16384, "factor": released.pop("factor")}
    values |= {**released, "mask_token_id": 100, "vocab_size": 131072}
    weights = load_file(STORED / kind / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "diffusion_head.weight"):
        rows = torch.zeros(131072, weights[name].shape[1])
        rows[:97] = weights[name]
        weights[name] = rows
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("modeling", "configuration"):
        (tmp_path / f"{name}_nemotron_labs_diffusion.py").write_text("raise RuntimeError('executed')")
    model = dl.load(tmp_path)
    assert type(model).__name__ == "NemotronLabsDiffusionModel"
    assert (model.config.mask_token_id, model.config.eos_token_id) == (100, released["eos_token_id"])
    assert model.config.trained_block_length == 8
    assert not model.config.is_causal
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(weights)
    again, ids = dl.load(tmp_path / "again"), torch.tensor([[3, 5, 100, 9]])
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)
    ar = dl.load(tmp_path, family="causal")
    assert ar.config.model_type == "nemotron_labs_diffusion_ar"
    assert ar.sampler_defaults == {"gen_length": 128, "temperature": 0.0}
    run = dl.denoise(ar, torch.tensor([[3, 5, 9]]), gen_length=3)
    assert run.autoregressive


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dlm_paradigm": "autoregressive"}, 'family="causal" for its autoregressive reading'),
        ({"dlm_paradigm": "sbd_block_diff"}, "this family has bidirectional and block_diff"),
        ({"attention_bias": True}, "attention_bias is True and mlp_bias False"),
        ({"mlp_bias": True}, "no released checkpoint"),
    ],
)
def test_other_networks_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NemotronLabsDiffusionConfig(**fields)


def test_checkpoints_with_images_are_refused(tmp_path: Path) -> None:
    values = {"model_type": "nemotron_labs_diffusion_vlm", "architectures": ["NemotronLabsDiffusionVLMModel"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a Nemotron-Labs-Diffusion with images"):
        dl.load(tmp_path)


@torch.no_grad()
def test_a_left_padded_row_is_what_it_is_alone() -> None:
    model = tiny("nemotron_labs_diffusion")
    ids = torch.randint(5, 40, (1, 7))
    alone = model(input_ids=ids).logits
    content = torch.tensor([[0] * 4 + [1] * 7])
    position = (content.cumsum(-1) - 1).clamp(min=0)
    padded = torch.cat([torch.full((1, 4), 3), ids], 1)
    logits = model(input_ids=padded, attention_mask=content, position_ids=position).logits
    torch.testing.assert_close(logits[:, 4:], alone, atol=1e-5, rtol=1e-5)


def test_both_readings_have_hook_points() -> None:
    for model in (tiny("nemotron_labs_diffusion"), tiny("causal", model_type="nemotron_labs_diffusion_ar")):
        check_hook_points(model)
        assert all(hasattr(layer.self_attn, "hook_q") for layer in model.model.layers)
