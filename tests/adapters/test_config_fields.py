"""Configs that leave fields out, or say what the original does not heed: the numbers are the original's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.adapters.families.llada import LLaDAConfig
from tests.adapters.golden import CLOSE, GOLDEN

ABSENT = object()


def rewritten(source: Path, target: Path, **changes: Any) -> PreTrainedModel:
    """A golden checkpoint under another config."""
    values = json.loads((source / "config.json").read_text()) | changes
    target.mkdir()
    text = json.dumps({name: value for name, value in values.items() if value is not ABSENT})
    (target / "config.json").write_text(text)
    (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return dlm_lens.load(target)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llada", {"rms_norm_eps": ABSENT}),  # the original's default is 1e-5, Llama's 1e-6
        ("llada", {"n_kv_heads": ABSENT, "mlp_ratio": ABSENT, "embedding_size": 256, "vocab_size": ABSENT}),
        ("mmada", {"rms_norm_eps": ABSENT, "n_kv_heads": None}),
        ("dream", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        ("dream", {"rms_norm_eps": ABSENT, "tie_word_embeddings": ABSENT, "rope_scaling": ABSENT}),
        ("smdm", {"norm_eps": ABSENT}),
        ("smdm", {"padded_vocab_size": None, "n_query_groups": None}),
        ("smdm_sink", {"norm_eps": ABSENT, "n_query_groups": ABSENT}),
    ],
)
@torch.no_grad()
def test_the_logits_are_the_original_s(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    golden = load_file(GOLDEN / family / "forward.safetensors")
    masked = [key.split(".")[0] for key in golden if key.endswith(("attention_mask", "attention_bias"))]
    name = next(key.removesuffix(".logits") for key in golden if key.endswith(".logits") and key[:-7] not in masked)
    model = rewritten(GOLDEN / family, tmp_path / "silent", **changes)
    torch.testing.assert_close(
        model(input_ids=golden[f"{name}.input_ids"]).logits, golden[f"{name}.logits"], **CLOSE
    )


def test_without_a_width_llada_s_mlp_is_mlp_ratio_times_the_model(tmp_path: Path) -> None:
    assert LLaDAConfig(d_model=32, n_heads=4).intermediate_size == 128  # the original's ratio is 4
    assert LLaDAConfig(d_model=32, n_heads=4, mlp_ratio=3).intermediate_size == 96
    assert LLaDAConfig(d_model=32, n_heads=4, intermediate_size=40).intermediate_size == 40
    saved = LLaDAConfig(d_model=32, n_heads=4, mlp_ratio=3)
    saved.save_pretrained(tmp_path)
    assert LLaDAConfig.from_pretrained(tmp_path).intermediate_size == 96


def test_a_rope_scaling_of_the_original_s_spelling_reaches_the_tables(tmp_path: Path) -> None:
    """Dream hands its `rope_scaling` to transformers: linear divides every angle by the factor."""
    plain = dlm_lens.load(GOLDEN / "dream")
    scaled = rewritten(GOLDEN / "dream", tmp_path / "scaled", rope_scaling={"type": "linear", "factor": 4.0})
    positions = torch.arange(9)[None]
    for got, expected in zip(
        scaled.model.rotary_emb(torch.empty(0), positions),
        plain.model.rotary_emb(torch.empty(0), positions / 4),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_an_activation_with_other_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activation_type='swiglu'; only silu, gelu, relu are implemented"):
        rewritten(GOLDEN / "llada", tmp_path / "swiglu", activation_type="swiglu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llada", "dream", "smdm_sink"])
@torch.no_grad()
def test_a_half_checkpoint_stays_half_and_near(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without a dtype anywhere the files' own counts; the numbers are those of its weights, up to its rounding."""
    weights = {name: value.to(dtype) for name, value in load_file(GOLDEN / family / "model.safetensors").items()}
    values = json.loads((GOLDEN / family / "config.json").read_text())
    values.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    half, wide = dlm_lens.load(tmp_path), dlm_lens.load(tmp_path, dtype="float32")
    assert (half.dtype, wide.dtype) == (dtype, torch.float32)
    ids = torch.arange(3, 20)[None]
    error = (half(input_ids=ids).logits.float() - wide(input_ids=ids).logits).abs()
    # The goldens' own bfloat16 runs differ by 0.04 on average, which sums of another CPU may double; float16 has
    # three bits more.
    bound = 0.1 if dtype == torch.bfloat16 else 0.1 / 8
    assert 0 < error.mean() < bound
