"""Parity with the original MMaDA, and how it writes images among text tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from dlm_lens.adapters import family_of
from dlm_lens.adapters.families.mmada import ImageLayout, MMaDAConfig
from dlm_lens.adapters.model_preparation import prepare_config
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect

MMADA = GOLDEN / "mmada"
LAYOUT = ImageLayout(text_tokens=122, codebook_size=64, mmu=111, soi=112, eoi=113)


@pytest.mark.parametrize(("path", "case"), cases(MMADA))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model = dlm_lens.load(path)
    golden = load_file(path / "forward.safetensors")
    ids = golden[f"{case}.input_ids"]
    bias = golden.get(f"{case}.attention_bias")
    mask = None if bias is None else bias.bool()
    # A padded query sees no key; the original spreads it evenly over all of them, which nobody reads.
    content = torch.ones_like(ids).bool() if mask is None else mask[:, 0].any(-1)
    seen = collect(model, ids, attention_mask=mask)
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", "attention_bias", "logits_bfloat16"):
            got = seen[key]
            if key.startswith(("q", "k", "v", "probs")):
                got, expected = got.transpose(1, 2), expected.transpose(1, 2)
            torch.testing.assert_close(
                got[content], expected[content], **CLOSE, msg=lambda m, key=key: f"{key}: {m}"
            )
            compared += 1
    assert compared == 3 + 8 * model.config.num_hidden_layers
    plain = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(plain[content], golden[f"{case}.logits"][content], **CLOSE)


@torch.no_grad()
def test_the_original_s_additive_bias_reproduces_its_padded_queries_too() -> None:
    """Allowed +1, forbidden the float32 minimum: a query without keys is then spread evenly over all of them."""
    model, golden = dlm_lens.load(MMADA), load_file(MMADA / "forward.safetensors")
    bias = golden["t2i_bias.attention_bias"].bool()
    additive = torch.where(bias, 1.0, torch.finfo(torch.float32).min)
    got = model(input_ids=golden["t2i_bias.input_ids"], attention_mask=additive).logits
    torch.testing.assert_close(got, golden["t2i_bias.logits"], **CLOSE)
    empty = ~bias[:, 0].any(-1)
    assert empty.any()
    torch.testing.assert_close(
        golden["t2i_bias.probs0"].transpose(1, 2)[empty], torch.full((int(empty.sum()), 4, 29), 1 / 29), **CLOSE
    )


@torch.no_grad()
def test_a_padding_mask_says_the_same_as_the_original_s_bias() -> None:
    model, golden = dlm_lens.load(MMADA), load_file(MMADA / "forward.safetensors")
    padding = golden["t2i_bias.attention_bias"].bool()[:, 0].any(-1)
    assert not padding.all()
    got = model(input_ids=golden["t2i_bias.input_ids"], attention_mask=padding.long()).logits
    torch.testing.assert_close(got[padding], golden["t2i_bias.logits"][padding], **CLOSE)


@pytest.mark.parametrize("case", ["plain_text", "plain_mmu"])
@torch.no_grad()
def test_bfloat16_is_near_the_stored_run_of_the_original(case: str) -> None:
    golden, model = load_file(MMADA / "forward.safetensors"), dlm_lens.load(MMADA, dtype="bfloat16")
    got = model(input_ids=golden[f"{case}.input_ids"]).logits
    difference = (got.float() - golden[f"{case}.logits_bfloat16"].float()).abs()
    # As in test_llada.py, whose network this is.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


def test_saving_writes_the_original_names_back(tmp_path: Path) -> None:
    model = dlm_lens.load(MMADA)
    model.save_pretrained(tmp_path)
    original, written = load_file(MMADA / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    config, theirs = (
        json.loads((tmp_path / "config.json").read_text()),
        json.loads((MMADA / "config.json").read_text()),
    )
    for name in ("d_model", "n_heads", "embedding_size", "codebook_size", "llm_vocab_size", "num_vq_tokens"):
        assert config[name] == theirs[name]
    again = dlm_lens.load(tmp_path)
    assert (again.config.model_type, again.config.codebook_size) == ("mmada", 64)
    assert again.sampler_defaults["float64_confidence"]


def test_special_ids_of_the_released_vocabulary_are_known() -> None:
    config = MMaDAConfig(vocab_size=134656, eos_token_id=None)
    prepare_config(config, family_of("mmada"))
    assert (config.mask_token_id, config.eos_token_id, config.eot_token_id) == (126336, 126081, 126348)
    assert MMaDAConfig(embedding_size=134656, vocab_size=1).vocab_size == 134656


def test_image_codes_become_tokens_and_back() -> None:
    codes = torch.tensor([[0, 5, 63], [11, 9, 62]])
    tokens = LAYOUT.tokens(codes)
    assert tokens.tolist() == [[122, 127, 185], [133, 131, 184]]
    assert LAYOUT.codes(tokens).equal(codes)
    assert LAYOUT.codes(LAYOUT.tokens([3, 4])).tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"image code 64 lies outside 0 to 63 \(a codebook of 64 after 122 text"):
        LAYOUT.tokens([1, 64])
    with pytest.raises(ValueError, match="image token 121 lies outside 122 to 185"):
        LAYOUT.codes([121])


def test_understanding_prompts_are_the_golden_s() -> None:
    prompts = load_file(MMADA / "sampling.safetensors")["mmu.prompt"]
    codes, text = LAYOUT.codes(prompts[:, 2:8]), prompts[:, 9:]
    assert prompts[0, :3].tolist() == [111, 112, 133]
    assert codes[0].tolist() == [11, 26, 8, 44, 23, 58]
    assert LAYOUT.understanding(codes, text).equal(prompts)
    assert LAYOUT.understanding(codes[1], text[1].tolist()).equal(prompts[1:])
    with pytest.raises(ValueError, match="2 images and 1 texts; give one text per image"):
        LAYOUT.understanding(codes, text[:1])


def test_the_layout_of_a_model_begins_behind_its_tokenizer() -> None:
    model: Any = tiny("mmada")
    assert ImageLayout.of(model).text_tokens == 64
    assert ImageLayout.of(model).codebook_size == 8192
    layout = ImageLayout.of(tiny("mmada", codebook_size=16))
    assert (layout.codebook_size, layout.mmu, layout.soi, layout.eoi) == (16, 126089, 126084, 126085)
    model.tokenizer = None
    with pytest.raises(ValueError, match=r"this model has none; give ImageLayout\(text_tokens="):
        ImageLayout.of(model)


DRAWING = ImageLayout(
    text_tokens=122, codebook_size=64, soi=112, eoi=113, t2i=110, ipad=114, bos=4, eos=3, mask=119
)


def test_generation_prompts_are_padded_on_the_left() -> None:
    prompt = DRAWING.generation([[7, 8, 9], [], [4, 7]], image_tokens=2)
    assert prompt.tolist() == [
        [110, 4, 7, 8, 9, 3, 112, 119, 119, 113],
        [114, 114, 114, 110, 4, 3, 112, 119, 119, 113],
        [114, 114, 110, 4, 7, 3, 112, 119, 119, 113],
    ]
    assert DRAWING.padding(prompt).sum(-1).tolist() == [0, 3, 2]
    assert DRAWING.image(prompt) == (7, 9)
    assert DRAWING.unconditional(prompt).tolist() == [[114, 114, 114, 110, 4, 3, 112, 119, 119, 113]] * 3
    assert DRAWING.generation(torch.tensor([7, 8, 9]), 2).equal(prompt[:1])
    assert DRAWING.generation([7, 8, 9], 2, length=7).tolist() == [[114, *prompt[0].tolist()]]
    assert DRAWING.generation([[7]]).shape == (1, 4 + 1 + 1024 + 1)


def test_a_generation_prompt_keeps_its_codes_without_its_text() -> None:
    prompt = DRAWING.generation([[7, 8]], 3)
    prompt[:, slice(*DRAWING.image(prompt))] = DRAWING.tokens([5, 6, 7])
    assert DRAWING.unconditional(prompt)[0, -4:-1].tolist() == [127, 128, 129]


def test_generation_prompts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"the longest text takes 6 positions .* but length is 5; shorten"):
        DRAWING.generation([[7], [7, 8, 9]], 2, length=5)
    with pytest.raises(ValueError, match="image_tokens is 0; it must be at least 1"):
        DRAWING.generation([[7]], 0)
    apart = torch.tensor([[110, 4, 3, 112, 119, 119, 113], [110, 4, 8, 3, 112, 119, 113]])
    with pytest.raises(ValueError, match="the image of prompt 1 begins at position 5, that of prompt 0 at 4"):
        DRAWING.image(apart)
    for row in ([110, 4, 3, 119, 113], [110, 4, 3, 112, 119], [110, 4, 3, 112, 113]):
        with pytest.raises(ValueError, match=r"prompt 0 does not end with \[soi\] image \[eoi\]"):
            DRAWING.image(torch.tensor([row]))
    with pytest.raises(ValueError, match="have no room for an empty text"):
        DRAWING.unconditional(torch.tensor([[4, 3, 112, 119, 113]]))
