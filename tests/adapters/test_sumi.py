"""Parity with the original Sumi's network, its checkpoints' format, and its softmax with a spare entry."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, check_saved_names, compare_with_the_original
from tests.reference import forward64

SUMI = GOLDEN / "sumi"


@pytest.mark.parametrize(("path", "case"), cases(SUMI))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    compare_with_the_original(path, case)


@torch.no_grad()
def test_logits_in_bfloat16() -> None:
    """The original rounds its patterns, which a fused kernel does not: both are as far from float32."""
    golden = load_file(SUMI / "forward.safetensors")
    ids, theirs, exact = golden["plain.input_ids"], golden["half.logits"].float(), golden["plain.logits"]
    formed, fused = (
        dl.load(SUMI, dtype="bfloat16", attn_implementation=name)(input_ids=ids).logits.float()
        for name in ("hooked", "sdpa")
    )
    # Another order of sums differs by a few ulps of logits of up to 8.
    assert (formed - theirs).abs().max() <= 0.25
    assert (formed - theirs).abs().mean() < 0.02
    assert (fused - theirs).abs().max() <= 0.25
    assert (fused - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


@torch.no_grad()
def test_a_padded_row_equals_the_original() -> None:
    model: Any = dl.load(SUMI)
    golden = load_file(SUMI / "forward.safetensors")
    ids, mask = golden["padded_row.input_ids"], golden["padded_row.attention_mask"]
    found = model(input_ids=ids, attention_mask=mask).logits[:, 4:]
    torch.testing.assert_close(found, golden["padded_row.logits"], **CLOSE)
    assert (found - model(input_ids=ids).logits[:, 4:]).abs().max() > 0.5


@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True}, {"head_dim": 12}])
@torch.no_grad()
def test_the_network_is_llamas_with_rows_below_one(config: dict[str, Any]) -> None:
    model: Any = tiny("sumi", **config)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = forward64(model, ids, mask)
    found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(found[0].double(), expected["logits"][0], atol=2e-5, rtol=2e-4)
    assert torch.allclose(found[1, 3:].double(), expected["logits"][1, 3:], atol=2e-5, rtol=2e-4)
    seen: list[torch.Tensor] = []
    handle = model.model.layers[1].self_attn.hook_pattern.register_forward_hook(
        lambda _m, _a, out: seen.append(out)
    )
    model(input_ids=ids, attention_mask=mask)
    handle.remove()
    torch.testing.assert_close(seen[0][0].double(), expected["pattern1"][0], atol=2e-5, rtol=2e-4)
    assert float(seen[0][0].sum(-1).max()) < 1


def test_the_original_format_is_loaded_and_saved(tmp_path: Path) -> None:
    model: Any = dl.load(SUMI)
    check_hook_points(model, plain=False)  # transformers' own function has no spare entry
    again: Any = check_saved_names(SUMI, tmp_path)
    given = json.loads((SUMI / "config.json").read_text())
    values = json.loads((tmp_path / "config.json").read_text())
    # The cache is off, and no code of a checkpoint is named.
    assert set(given.pop("auto_map")) == {"AutoConfig", "AutoModel", "AutoModelForMaskGeneration"}
    assert {name: values.get(name) for name in given} == given | {
        "use_cache": False,
        "transformers_version": values["transformers_version"],
    }
    assert "softmax" not in values
    assert "auto_map" not in values
    assert values["architectures"] == ["SumiForMaskGeneration"]
    ids = torch.arange(6)[None]
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    assert again.config.mask_token_id is None
    assert again.sampler_defaults["canvas_length"] == 2048


def test_what_is_not_implemented_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add_qkv_bias=True, biases of q, k and v alone"):
        tiny("sumi", add_qkv_bias=True)
    tiny("sumi").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sumi has no mask token: its positions hold random tokens"):
        dl.load(tmp_path, mask_token_id=3)
