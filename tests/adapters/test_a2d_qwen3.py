"""Parity with the original A2D-Qwen3, and its siblings with their hosts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

import dlm_lens
from dlm_lens.adapters import family_of
from dlm_lens.adapters.model_preparation import prepare_config
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect

A2D = GOLDEN / "a2d_qwen3"
IDS = {name: json.loads((A2D / "sampling.json").read_text())[name] for name in ("mask_token_id", "eos_token_id")}


def normed(model: Any, ids: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """q and k after the norm of each head, before the rotation."""
    seen: dict[str, Tensor] = {}
    handles = [
        getattr(layer.self_attn, f"{name}_norm").register_forward_hook(
            lambda _m, _a, out, key=f"{name}_norm{index}": seen.__setitem__(key, out.transpose(1, 2))
        )
        for index, layer in enumerate(model.model.layers)
        for name in "qk"
    ]
    model(input_ids=ids, **inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("path", "case"), cases(A2D))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model = dlm_lens.load(path, **IDS)
    golden = load_file(path / "forward.safetensors")
    ids = golden[f"{case}.input_ids"]
    inputs = {n: golden[f"{case}.{n}"] for n in ("attention_mask",) if f"{case}.{n}" in golden}
    seen = {**collect(model, ids, **inputs), **normed(model, ids, inputs)}
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", *inputs, "logits_bfloat16"):
            # Padded queries see the valid keys in both, so that every row is compared.
            torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
            compared += 1
    # Embedding, final norm, logits; per layer block, q, k, v, both norms, pattern, z, attention and MLP outputs.
    assert compared == 3 + 10 * model.config.num_hidden_layers
    torch.testing.assert_close(model(input_ids=ids, **inputs).logits, golden[f"{case}.logits"], **CLOSE)


@torch.no_grad()
def test_bfloat16_is_near_the_original() -> None:
    model = dlm_lens.load(A2D, dtype="bfloat16", **IDS)
    golden = load_file(A2D / "forward.safetensors")
    logits = model(input_ids=golden["plain.input_ids"]).logits
    difference = (logits.float() - golden["plain.logits_bfloat16"].float()).abs()
    # As in test_dream.py: another CPU's sums differ by a few ulps of logits of up to 8.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


@pytest.mark.parametrize(("model_type", "host"), [("a2d-qwen2", Qwen2ForCausalLM), ("a2d-llama", LlamaForCausalLM)])
@torch.no_grad()
def test_siblings_are_their_hosts_without_causality(model_type: str, host: Any) -> None:
    model = tiny("a2d_qwen3", model_type=model_type)
    fields = {k: v for k, v in model.config.to_dict().items() if k in HOST_FIELDS}
    stock = host(host.config_class(**fields))
    stock.load_state_dict(model.state_dict())
    stock.eval()
    ids = torch.arange(12).view(2, 6)
    everything = torch.zeros(2, 1, 6, 6)
    torch.testing.assert_close(
        model(input_ids=ids).logits, stock(input_ids=ids, attention_mask=everything).logits, atol=1e-5, rtol=1e-5
    )
    assert (model(input_ids=ids).logits - stock(input_ids=ids).logits).abs().max() > 0.1


HOST_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "max_position_embeddings", "pad_token_id", "eos_token_id",
               "bos_token_id")  # fmt: skip


def test_hook_points_saving_and_ids(tmp_path: Path) -> None:
    model = dlm_lens.load(A2D, **IDS)
    check_hook_points(model)
    assert not model.config.use_cache
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    original, written = load_file(A2D / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again = dlm_lens.load(tmp_path)
    assert again.config.mask_token_id == IDS["mask_token_id"]
    assert again.sampler_defaults["block_length"] == 128
    (family,) = [family for family in dlm_lens.families() if family.name == "a2d_qwen3"]
    assert family.special_ids[151936] == {"mask": 151669, "eos": 151645}


def test_the_tokenizer_gets_the_mask_as_its_next_id(tmp_path: Path) -> None:
    """As dllm does when it loads one; a tokenizer with a mask token, or with other lengths, is left alone."""
    model = tiny("a2d_qwen3")  # ids 0 to 63, the mask is 63
    model.save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(63)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    assert dlm_lens.load(tmp_path).tokenizer("w3 <|mask|> w4")["input_ids"] == [3, 63, 4]
    assert dlm_lens.load(tmp_path, mask_token_id=61).tokenizer.mask_token is None
    model.tokenizer.save_pretrained(tmp_path)
    assert dlm_lens.load(tmp_path).tokenizer.mask_token == "[MASK]"


@pytest.mark.parametrize(
    ("model_type", "tokens", "own", "expected"),
    [
        ("a2d-qwen3", None, None, 151669),
        ("a2d-qwen2", None, None, 151665),
        ("a2d-qwen3", 151669, None, 151669),
        ("a2d-qwen2", 151665, None, 151665),
        ("a2d-qwen2", 151666, 151665, 151665),
        ("a2d-qwen3", 151670, 151669, 151669),
    ],
)
def test_the_mask_is_the_tokenizers(
    model_type: str, tokens: int | None, own: int | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """dllm adds <|mask|> to the tokenizer; Qwen2.5's and Qwen3's have equal embeddings and other next free ids."""

    class Tokens:
        mask_token_id = own

        def __len__(self) -> int:
            return tokens or 0

        def add_special_tokens(self, added: dict[str, str]) -> None:
            assert added == {"mask_token": "<|mask|>"}
            self.mask_token_id = tokens

    family = family_of(model_type)
    config = family.layouts[model_type][0](vocab_size=151936, eos_token_id=None)
    tokenizer = None if tokens is None else Tokens()
    prepare_config(config, family, tokenizer)
    assert (config.mask_token_id, config.eos_token_id) == (expected, 151645)
    assert tokenizer is None or tokenizer.mask_token_id == expected
    assert not caplog.messages


def test_a_tokenizer_as_long_as_the_embedding_leaves_no_row_for_a_mask() -> None:
    family = family_of("a2d-llama")
    config = family.layouts["a2d-llama"][0](vocab_size=9)
    with pytest.raises(ValueError, match=r"neither config\.json nor the tokenizer names a mask token"):
        prepare_config(config, family, range(9))


BLOCKS = GOLDEN / "a2d_qwen3_bd3lm"
WHOLE = ("block_causal", "train_two_copies")
"""Cases of one pass; the cached one is compared through trajectories (test_dllm_blocks_golden.py)."""


@pytest.mark.parametrize(("path", "case"), [one for one in cases(BLOCKS) if one.values[1] in WHOLE])
@torch.no_grad()
def test_block_masks_give_the_original_intermediates(path: Path, case: str) -> None:
    model = dlm_lens.load(path, mask_token_id=155)
    golden = load_file(path / "forward.safetensors")
    stored = {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}
    ids, visible = stored["input_ids"], stored["attention_bias"].bool()
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    inputs: dict[str, Any] = {"attention_mask": {"full_attention": mask}, "position_ids": stored["position_ids"]}
    seen = collect(model, ids, **inputs)
    # Padded queries see nothing; the original gives them zeros.
    content = visible.expand(len(ids), -1, -1, -1).any(-1)[:, 0]
    compared = 0
    names = [f"{name}{layer}" for name in ("hidden.block", "probs", "q", "k", "v", "z") for layer in range(3)]
    for key in ("logits", "hidden.final_norm", *names):
        got, expected = seen[key], stored[key]
        if key[0] in "qkv" or key.startswith("probs"):
            got, expected = got.transpose(1, 2), expected.transpose(1, 2)
        torch.testing.assert_close(got[content], expected[content], **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
        compared += 1
    assert compared == 20


@pytest.mark.parametrize("model_type", ["a2d-llama", "a2d-qwen2", "a2d-qwen3"])
def test_a_masked_model_with_the_config_of_its_ar_model_is_loaded_by_the_family(
    model_type: str, tmp_path: Path
) -> None:
    model = tiny("a2d_qwen3", model_type=model_type)
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    foreign = ("is_causal", "mask_token_id", "architectures")
    written = {name: value for name, value in values.items() if name not in foreign}
    host = model_type.removeprefix("a2d-")
    (tmp_path / "config.json").write_text(json.dumps(written | {"model_type": host}))
    mask = model.config.mask_token_id
    again = dlm_lens.load(tmp_path, family="a2d_qwen3", mask_token_id=mask)
    ids = torch.tensor([[5, 9, 14, mask]])
    assert type(again) is type(model)
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    with pytest.raises(ValueError, match=rf"mask_token_id is {mask}, .* model_type '{host}': .*family='a2d_qwen3'"):
        dlm_lens.load(tmp_path, mask_token_id=mask)
