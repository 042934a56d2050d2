"""Parity with the original Duo's network, its checkpoints' format, and what the noise level does to it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, compare_dit_with_the_original
from tests.dit64 import dit64

DUO = GOLDEN / "duo"


@pytest.mark.parametrize(("path", "case"), cases(DUO))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    compare_dit_with_the_original(path, case, log_probs=lambda logits, ids, sigma: logits.log_softmax(-1))


@torch.no_grad()
def test_the_noise_level_is_an_argument_and_0_without_it() -> None:
    model: Any = dl.load(DUO)
    golden = load_file(DUO / "forward.safetensors")
    ids = golden["clean.input_ids"]
    torch.testing.assert_close(model(input_ids=ids).logits, golden["clean.logits"], **CLOSE)
    embedded = model.model.embed_tokens(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(input_ids=ids).logits)
    assert (golden["clean.logits"] - golden["noisy.logits"]).abs().amax((1, 2)).min() > 1


@torch.no_grad()
def test_padded_rows_are_what_they_are_alone() -> None:
    model: Any = dl.load(DUO)
    ids, sigma = torch.arange(10)[None], torch.tensor([1.3])
    alone = dit64(model, ids, sigma=1.3)["logits"]
    content = torch.ones(1, 13, dtype=torch.long)
    content[0, :3] = 0
    padded = torch.cat([torch.full((1, 3), 7), ids], 1)
    positions = (content.cumsum(-1) - 1).clamp(min=0)
    found = model(input_ids=padded, attention_mask=content, position_ids=positions, sigma=sigma).logits[:, 3:]
    torch.testing.assert_close(found.double(), alone, atol=2e-5, rtol=2e-4)


def test_the_original_format_is_loaded_and_saved(tmp_path: Path) -> None:
    model: Any = dl.load(DUO)
    check_hook_points(model)
    assert model.config.mask_token_id is None
    assert model.config.time_conditioning
    model.save_pretrained(tmp_path)
    original, written = load_file(DUO / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    original.pop("backbone.rotary_emb.inv_freq")  # a buffer, which is computed here
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    values = json.loads((tmp_path / "config.json").read_text())
    given = json.loads((DUO / "config.json").read_text())
    code = given.pop("auto_map")
    assert set(code) == {"AutoConfig", "AutoModelForMaskedLM"}
    assert "auto_map" not in values
    assert {name: values.get(name) for name in given} == given | {
        "torch_dtype": None,
    }  # fmt: skip
    again: Any = dl.load(tmp_path)
    ids = torch.arange(6)[None]
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    assert again.sampler_defaults["noise_removal"] == "ancestral"


def test_what_is_no_duo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="causal=True, an AR model of the paper's comparison"):
        tiny("duo", causal=True)
    tiny("duo").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="duo has no mask token: its positions hold random tokens"):
        dl.load(tmp_path, mask_token_id=3)


def test_released_checkpoints_take_gpt2s_tokenizer_with_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authors' code adds "[PAD]" to GPT-2's tokenizer; its row is the last of the embedding."""
    place = tmp_path / "openai-community" / "gpt2"
    place.mkdir(parents=True)
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u0120a"]
    words = [*letters, *(f"word{i}" for i in range(50256 - len(letters))), "<|endoftext|>"]
    (place / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (place / "merges.txt").write_text("#version: 0.2\n\u0120 a\n")
    monkeypatch.chdir(tmp_path)
    tiny("duo", vocab_size=50258, hidden_size=8, num_attention_heads=2, eos_token_id=None, pad_token_id=None,
         bos_token_id=None).save_pretrained("checkpoint")  # fmt: skip
    model: Any = dl.load("checkpoint")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        50256,
        50256,
        50257,
    )
    assert model.config.mask_token_id is None
    assert model.tokenizer.pad_token == "[PAD]"
    assert model.tokenizer.convert_ids_to_tokens(50257) == "[PAD]"
    assert model.tokenizer.mask_token is None
    run = dl.denoise(model, "a a", gen_length=3, steps=2)
    assert run.tokens.shape == (1, run.prompt_length + 3)
