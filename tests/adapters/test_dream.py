"""Parity with the original Dream; what the numbers are: the golden README quoted in docs/models.md."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import dlm_lens
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect

DREAM = GOLDEN / "dream"
VARIANTS = [DREAM, DREAM / "variants" / "mha"]


@pytest.mark.parametrize(("path", "case"), cases(*VARIANTS))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model = dlm_lens.load(path)
    golden = load_file(path / "forward.safetensors")
    ids = golden[f"{case}.input_ids"]
    inputs = {n: golden[f"{case}.{n}"] for n in ("attention_mask", "position_ids") if f"{case}.{n}" in golden}
    # The original gives padded queries no key at all; their rows are nobody's business.
    content = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    seen = collect(model, ids, **inputs)
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", *inputs, "logits_bfloat16"):
            got = seen[key]
            if key.startswith(("q", "k", "v", "probs")):
                got, expected = got.transpose(1, 2), expected.transpose(1, 2)
            torch.testing.assert_close(
                got[content], expected[content], **CLOSE, msg=lambda m, key=key: f"{key}: {m}"
            )
            compared += 1
    assert compared == 3 + 8 * model.config.num_hidden_layers
    plain = model(input_ids=ids, **inputs).logits
    torch.testing.assert_close(plain[content], golden[f"{case}.logits"][content], **CLOSE)


@torch.no_grad()
def test_bfloat16_equals_hugging_face_layers() -> None:
    model = dlm_lens.load(DREAM, dtype="bfloat16")
    values = {name: getattr(model.config, name) for name in Qwen2Config().to_dict() if hasattr(model.config, name)}
    config = Qwen2Config(**{**values, "model_type": "qwen2"})
    config.is_causal = False
    stock = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    stock.load_state_dict(model.state_dict())
    # `.to(bfloat16)` rounds the inverse frequencies of a built model; loading in bfloat16 does not.
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    for layer in stock.model.layers:
        layer.self_attn.is_causal = False
    golden = load_file(DREAM / "forward.safetensors")
    ids = golden["plain.input_ids"]
    assert model(input_ids=ids).logits.equal(stock(input_ids=ids).logits)
    difference = (model(input_ids=ids).logits.float() - golden["plain.logits_bfloat16"].float()).abs()
    # As in test_llada.py: another CPU's sums differ by a few ulps.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


def test_saving_writes_the_original_names_back(tmp_path: Path) -> None:
    model = dlm_lens.load(DREAM)
    model.save_pretrained(tmp_path)
    original, written = load_file(DREAM / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    again = dlm_lens.load(tmp_path)
    assert again.config.model_type == "Dream"
    assert again.config.logit_shift
    assert again.sampler_defaults["remasking"] == "origin"


def test_the_tokenizer_is_read_from_vocabulary_and_merges(tmp_path: Path) -> None:
    """The released checkpoints have no tokenizer.json, and a class of their own (DreamLM/Dream, issue 81)."""
    model = tiny("dream")
    model.save_pretrained(tmp_path)
    entries = [
        *map(chr, range(97, 123)),
        "\u0120",
        "ab",
        "\u0120ab",
        *map(chr, range(48, 58)),
        *map(chr, range(65, 87)),
    ]
    (tmp_path / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(entries)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    names = {61: "<|endoftext|>", 62: "<|beginoftext|>", 63: "<|mask|>"}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(i): {"content": text, "special": True} for i, text in names.items()},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "unk_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = dlm_lens.load(tmp_path).tokenizer
    # Digits are tokens by themselves, and a space belongs to the word after it.
    assert tokenizer("ab abc12 ab<|mask|>")["input_ids"] == [27, 28, 2, 30, 31, 28, 63]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (62, 61, 63)
    run = dlm_lens.denoise(dlm_lens.load(tmp_path), "ab ab", gen_length=4)
    assert run.tokens[0, :2].tolist() == [27, 28]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "OtherTokenizer"}))
    with pytest.raises(ValueError, match=r"needs further files, or its own Python code"):
        dlm_lens.load(tmp_path)
