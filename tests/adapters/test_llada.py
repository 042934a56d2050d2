"""Parity with the original LLaDA; what the numbers are: ../golden/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import dlm_lens
from dlm_lens.adapters.families.llada import LLaDAConfig
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect

LLADA = GOLDEN / "llada"
VARIANTS = [LLADA, LLADA / "variants" / "gqa_tied"]


@pytest.mark.parametrize(("path", "case"), cases(*VARIANTS))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model = dlm_lens.load(path)
    golden = load_file(path / "forward.safetensors")
    mask = golden.get(f"{case}.attention_mask")
    seen = collect(model, golden[f"{case}.input_ids"], attention_mask=mask)
    plain = model(input_ids=golden[f"{case}.input_ids"], attention_mask=mask).logits
    torch.testing.assert_close(plain, golden[f"{case}.logits"], **CLOSE)
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", "attention_mask", "logits_bfloat16"):
            torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
            compared += 1
    assert compared == 3 + 8 * model.config.num_hidden_layers


class Float32Rotary(LlamaRotaryEmbedding):
    """Hugging Face's tables before they are cast to the model's dtype."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.float(), position_ids)


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.name)
@torch.no_grad()
def test_bfloat16_equals_hugging_face_layers_with_float32_rotation(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dlm_lens.load(path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    values = {name: getattr(model.config, name) for name in LlamaConfig().to_dict() if hasattr(model.config, name)}
    config = LlamaConfig(**{**values, "model_type": "llama"})
    config.is_causal = False
    stock = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    stock.load_state_dict(model.state_dict())
    stock.model.rotary_emb = Float32Rotary(config)
    for layer in stock.model.layers:
        layer.self_attn.is_causal = False

    def rotate(q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        q32, k32 = apply_rotary_pos_emb(q.float(), k.float(), *tables)
        return q32.to(q.dtype), k32.to(k.dtype)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", rotate)
    golden = load_file(path / "forward.safetensors")
    name = next(key.removesuffix(".logits") for key in golden if key.endswith(".logits"))
    ids = golden[f"{name}.input_ids"]
    got = model(input_ids=ids).logits
    # The same operations in the same order on the same machine: no difference at all.
    assert (got - stock(input_ids=ids).logits).abs().max() == 0


@torch.no_grad()
def test_bfloat16_is_near_the_stored_run_of_the_original() -> None:
    golden = load_file(LLADA / "forward.safetensors")
    got = dlm_lens.load(LLADA, dtype="bfloat16")(input_ids=golden["plain_b1.input_ids"]).logits
    difference = (got.float() - golden["plain_b1.logits_bfloat16"].float()).abs()
    # bfloat16 sums depend on the CPU: allow four ulps of the largest logits (8 to 16: 1/16 each), and on average
    # half of what bfloat16 itself costs against float32 (0.02 to 0.04).
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


def test_bfloat16_tables_would_differ() -> None:
    """The float32 rotation is what the test above sees: without it the logits move."""
    model = dlm_lens.load(LLADA, dtype="bfloat16")
    ids = load_file(LLADA / "forward.safetensors")["plain_b1.input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
        assert (model(input_ids=ids).logits - before).abs().max() > 0.01


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.name)
def test_saving_writes_the_original_names_back(path: Path, tmp_path: Path) -> None:
    model = dlm_lens.load(path)
    model.save_pretrained(tmp_path)
    original, written = load_file(path / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    config = json.loads((tmp_path / "config.json").read_text())
    hub = json.loads((path / "config.json").read_text())
    for name in ("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_hidden_size", "max_sequence_length"):
        assert config[name] == hub[name]
    assert "auto_map" not in config
    again = dlm_lens.load(tmp_path)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    assert again.config.mask_token_id == model.config.mask_token_id


def test_the_original_config_maps_to_llama() -> None:
    config = LLaDAConfig(
        d_model=64, n_heads=4, n_layers=2, mlp_ratio=3, mlp_hidden_size=None, embedding_size=None, vocab_size=99,
        rope_theta=500000.0, n_kv_heads=None, weight_tying=True, max_sequence_length=77,
    )  # fmt: skip
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 4)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (16, 192, 99)
    assert config.rope_parameters["rope_theta"] == 500000.0
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 77
    assert LLaDAConfig(d_model=64, n_heads=4, multi_query_attention=True).num_key_value_heads == 1


@pytest.mark.parametrize(("option", "value"), [("block_type", "sequential"), ("alibi", True), ("rope", False)])
def test_an_architecture_that_is_not_implemented_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}; only"):
        LLaDAConfig(**{option: value})


def test_special_ids_of_the_released_vocabulary_are_known(tmp_path: Path) -> None:
    from dlm_lens.adapters import family_of
    from dlm_lens.adapters.model_preparation import prepare_config

    config = LLaDAConfig(vocab_size=126464)
    prepare_config(config, family_of("llada"))
    assert (config.mask_token_id, config.eos_token_id, config.eot_token_id) == (126336, 126081, 126348)
    # iLLaDA's vocabulary, of which only the mask is known: nothing is Llama's.
    other = LLaDAConfig(vocab_size=155136)
    prepare_config(other, family_of("llada"))
    assert (other.mask_token_id, other.bos_token_id, other.eos_token_id) == (5, None, None)
    named = LLaDAConfig(vocab_size=126464, mask_token_id=7, eos_token_id=8)
    prepare_config(named, family_of("llada"))
    assert (named.mask_token_id, named.eos_token_id) == (7, 8)


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    weights = load_file(LLADA / "model.safetensors")
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, tmp_path / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((LLADA / "config.json").read_text())
    whole, sharded = dlm_lens.load(LLADA).state_dict(), dlm_lens.load(tmp_path).state_dict()
    assert all(whole[name].equal(sharded[name]) for name in whole)
