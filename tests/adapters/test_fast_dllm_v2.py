"""Parity with the original Fast-dLLM v2: every intermediate, block causal attention, padding, cache, loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

import dlm_lens
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, collect
from tests.reference import forward64

FAST = GOLDEN / "fast_dllm_v2"
MASK = json.loads((FAST / "forward.json").read_text())["mask_token_id"]


def stored(case: str) -> dict[str, Tensor]:
    golden = load_file(FAST / "forward.safetensors")
    return {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}


def visible_by_hand(length: int, block: int, padding: int = 0) -> Tensor:
    """M of one row, entry by entry: content of its own and of earlier blocks, counted from the first token."""
    of = [(place - padding) // block for place in range(length)]
    return torch.tensor([[0 <= of[key] <= of[query] for key in range(length)] for query in range(length)])


@torch.no_grad()
def test_every_intermediate_equals_the_original() -> None:
    model, golden = dlm_lens.load(FAST, mask_token_id=MASK), stored("block_causal")
    seen = collect(model, golden["input_ids"])
    names = [key for key in golden if key not in ("input_ids", "attention_bias", "logits_bfloat16")]
    for key in names:
        torch.testing.assert_close(seen[key], golden[key], **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # Embedding, final norm, logits; per layer block, q, k, v, pattern, z, attention and MLP outputs.
    assert len(names) == 3 + 8 * model.config.num_hidden_layers
    assert golden["attention_bias"][0, 0].bool().equal(visible_by_hand(20, 8))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_cached_blocks_equal_the_original(implementation: str) -> None:
    model = dlm_lens.load(FAST, mask_token_id=MASK, attn_implementation=implementation)
    golden = stored("cached_block")
    cache = DynamicCache()
    model(input_ids=golden["prefix_ids"], past_key_values=cache, use_cache=True)
    for layer in range(3):
        torch.testing.assert_close(cache.layers[layer].keys, golden[f"past_k{layer}"], **CLOSE)
        torch.testing.assert_close(cache.layers[layer].values, golden[f"past_v{layer}"], **CLOSE)
    logits = model(input_ids=golden["input_ids"], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, golden["logits"], **CLOSE)
    assert golden["position_ids"].flatten().tolist() == list(range(8, 16))


@torch.no_grad()
def test_bfloat16_is_near_the_original() -> None:
    model, golden = dlm_lens.load(FAST, mask_token_id=MASK, dtype="bfloat16"), stored("block_causal")
    difference = (model(input_ids=golden["input_ids"]).logits.float() - golden["logits_bfloat16"].float()).abs()
    # As in test_dream.py: another CPU's sums differ by a few ulps of logits of up to 8.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


@torch.no_grad()
def test_padding_is_no_part_of_the_blocks() -> None:
    model = tiny("fast_dllm_v2", bd_size=4)
    ids = torch.arange(1, 23).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits
    for row, padding in enumerate((0, 3)):
        visible = visible_by_hand(11 - padding, 4)[None, None]
        alone = forward64(model, ids[row : row + 1, padding:], visible=visible)["logits"]
        torch.testing.assert_close(logits[row : row + 1, padding:].double(), alone, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_a_mask_of_four_axes_is_taken_as_it_is() -> None:
    model = tiny("fast_dllm_v2", bd_size=4)
    ids = torch.arange(1, 12)[None]
    everything = torch.zeros(1, 1, 11, 11)
    for mask in (everything, {"full_attention": everything}):
        logits = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(logits.double(), forward64(model, ids)["logits"], atol=2e-5, rtol=2e-4)
    assert (model(input_ids=ids).logits - logits).abs().max() > 0.1


def test_hook_points_saving_and_ids(tmp_path: Path) -> None:
    model = dlm_lens.load(FAST, mask_token_id=MASK)
    check_hook_points(model)
    assert not model.config.use_cache
    assert model.sampler_defaults["block_length"] == model.config.bd_size == 8
    model.save_pretrained(tmp_path)
    original, written = load_file(FAST / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again = dlm_lens.load(tmp_path)
    assert (again.config.mask_token_id, again.config.bd_size) == (MASK, 8)
    (family,) = [family for family in dlm_lens.families() if family.name == "fast_dllm_v2"]
    assert family.special_ids[152064] == family.special_ids[151936] == {"mask": 151665, "eos": 151645}


@pytest.mark.parametrize("wrong", [0, -8, 8.0, True, "8"])
def test_a_block_has_a_length(tmp_path: Path, wrong: Any) -> None:
    model = dlm_lens.load(FAST, mask_token_id=MASK)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "bd_size": wrong}))
    with pytest.raises(ValueError, match="bd_size"):
        dlm_lens.load(tmp_path)


def test_without_a_mask_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mask_token_id"):
        dlm_lens.load(FAST)
