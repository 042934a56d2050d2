from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import dlm_lens
from dlm_lens.attention import attach_hooks
from dlm_lens.hooks import ablate
from dlm_lens.testing import tiny
from dlm_lens.training import convert
from tests.reference import forward64

IDS = torch.tensor([[3, 9, 27, 17, 51, 29, 23, 5], [1, 2, 4, 8, 16, 32, 11, 22]])


def tokenizer(words: int, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(words - 2)} | {"<unk>": words - 2, "<end>": words - 1}
    whole = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    whole.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", eos_token="<end>", **special)


def source(layout: str = "qwen2", *, words: int | None = 64, **config: Any) -> Any:
    model = tiny("causal", model_type=layout, **config)
    model.tokenizer = None if words is None else tokenizer(words)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["qwen2", "llama"])
def test_without_sinks_it_is_the_ar_network_without_its_causal_mask(layout: str, tied: bool) -> None:
    ar = source(layout, tie_word_embeddings=tied)
    dlm = convert(ar, sinks=0)
    expected = forward64(ar, IDS, causal=False)["logits"]
    logits = dlm(input_ids=IDS).logits
    # A float32 network against float64.
    torch.testing.assert_close(logits[..., :64].double(), expected, rtol=1e-4, atol=1e-4)
    causal = forward64(ar, IDS, causal=True)["logits"]
    assert float((logits[..., :64].detach() - causal).abs().max()) > 0.1
    # The AR model stays what it was.
    torch.testing.assert_close(ar(input_ids=IDS).logits.double(), causal, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("words", "rows", "mask"), [(64, 65, 64), (60, 64, 60)])
def test_the_mask_token_takes_a_spare_row_or_adds_one(words: int, rows: int, mask: int, tied: bool) -> None:
    ar = source(words=words, tie_word_embeddings=tied)
    dlm = convert(ar)
    embedding, head = dlm.get_input_embeddings().weight, dlm.get_output_embeddings().weight
    old = ar.get_input_embeddings().weight
    assert (dlm.config.vocab_size, dlm.config.mask_token_id, dlm.tokenizer.mask_token_id) == (rows, mask, mask)
    assert dlm.tokenizer.convert_ids_to_tokens(mask) == dlm.tokenizer.mask_token == "<|mask|>"
    assert (len(embedding), len(head)) == (rows, rows)
    assert torch.equal(embedding[:words], old[:words])
    torch.testing.assert_close(embedding[mask], old[:words].mean(0), rtol=1e-5, atol=1e-6)
    assert (head is embedding) == tied
    assert ar.tokenizer.mask_token is None


def test_a_mask_token_among_the_others_becomes_the_mean_of_all_of_them() -> None:
    ar = dlm_lens.load("toy-ar")
    mask, old = ar.tokenizer.mask_token_id, ar.get_input_embeddings().weight
    words = len(ar.tokenizer)
    assert 0 < mask < words - 1
    dlm = convert(ar)
    assert dlm.config.mask_token_id == mask
    others = torch.cat([old[:mask], old[mask + 1 : words]])
    torch.testing.assert_close(dlm.get_input_embeddings().weight[mask], others.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["qwen2", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 1},
        {"sinks": 2, "position": "end", "zero_value": True},
        {"sinks": 1, "gated": True},
        {"sinks": 0, "softmax": "off_by_one"},
        {"sinks": 0, "softmax": "sink_logits", "shift": False},
    ],
)
def test_it_round_trips_and_opens_in_both_hosts(layout: str, options: dict, tmp_path: Path) -> None:
    dlm = convert(source(layout, tie_word_embeddings=layout == "qwen2"), **options)
    for layer in dlm.model.layers:
        if options.get("softmax") == "sink_logits":
            torch.nn.init.normal_(layer.self_attn.sink_logits)
        if options.get("gated"):
            torch.nn.init.normal_(layer.self_attn.gate_proj.weight)
    dlm.save_pretrained(tmp_path)
    dlm.tokenizer.save_pretrained(tmp_path)
    loaded = dlm_lens.load(tmp_path)
    logits = dlm(input_ids=IDS).logits.detach()
    assert torch.equal(loaded(input_ids=IDS).logits, logits)
    assert loaded.tokenizer.mask_token_id == loaded.config.mask_token_id == 64
    assert loaded.config.logit_shift is options.get("shift", True)
    run = dlm_lens.denoise(loaded, "w1 w2 w3", steps=4, gen_length=4, seed=0)
    assert not bool((run.canvases[-1] == 64).any())
    lm = dlm_lens.DiffusionLM(loaded)  # its self-check compares patterns and logits
    with lm.trace(IDS):
        traced = lm.lm_head.output.save()
    layout_ = dlm_lens.attention.SinkLayout.of(loaded)
    torch.testing.assert_close(traced[:, layout_.canvas(traced.shape[1])], logits, rtol=1e-4, atol=1e-4)
    bridged = dlm_lens.bridge(loaded)
    torch.testing.assert_close(bridged(IDS), logits, rtol=1e-4, atol=1e-4)


def test_new_weights_come_from_the_seed() -> None:
    ar = source()
    first, again, other = (convert(ar, seed=seed).get_input_embeddings().sinks for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    convert(ar, gated=True)
    assert torch.equal(before, torch.get_rng_state())


def test_gates_start_at_one_half() -> None:
    ar = source()
    gated, plain = convert(ar, sinks=0, gated=True), convert(ar, sinks=0)
    for layer in plain.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.5)
    torch.testing.assert_close(gated(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_a_checkpoint_directory_is_converted(tmp_path: Path) -> None:
    ar = source("llama").to(torch.bfloat16)
    ar.save_pretrained(tmp_path)
    ar.tokenizer.save_pretrained(tmp_path)
    dlm = convert(tmp_path, sinks=0)
    assert dlm.dtype == torch.float32
    assert dlm.config.model_type == "sink_llama"
    assert torch.equal(dlm.model.norm.weight, ar.model.norm.weight.float())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("layout", ["qwen2", "llama"])
@torch.no_grad()
def test_in_bfloat16_it_equals_the_model_that_is_loaded_again(
    layout: str, dtype: str | None, tied: bool, tmp_path: Path
) -> None:
    ar = source(layout, max_position_embeddings=2048, tie_word_embeddings=tied).to(torch.bfloat16)
    ar.save_pretrained(tmp_path / "ar")
    ar.tokenizer.save_pretrained(tmp_path / "ar")
    dlm: Any = convert(tmp_path / "ar", dtype=dtype)
    assert {value.dtype for value in dlm.parameters()} == {dlm.dtype} == {torch.bfloat16}
    assert (dlm.get_output_embeddings().weight is dlm.get_input_embeddings().weight) == tied
    dlm.save_pretrained(tmp_path / "dlm")
    dlm.tokenizer.save_pretrained(tmp_path / "dlm")
    loaded: Any = dlm_lens.load(tmp_path / "dlm")
    assert loaded.model.rotary_emb.inv_freq.equal(dlm.model.rotary_emb.inv_freq)
    ids = torch.randint(64, (1, 1024), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(input_ids=ids).logits, dlm(input_ids=ids).logits)


def test_without_a_tokenizer_the_mask_is_a_row_behind() -> None:
    dlm = convert(source(words=None), mask_token_id=None)
    assert (dlm.config.mask_token_id, dlm.config.vocab_size) == (64, 65)
    assert convert(source(words=None), mask_token_id=63).config.vocab_size == 64


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(ValueError, match="is of model_type 'llada'; an AR checkpoint of qwen2 or llama"):
        convert(tiny("llada"))
    with pytest.raises(ValueError, match=r"the mask token 7 is in use: it is the token 'w7'"):
        convert(source(), mask_token_id=7)
    with pytest.raises(
        ValueError, match="mask_token_id is 70, and the tokenizer's mask token has the id 64; leave it"
    ):
        convert(source(), mask_token_id=70)
    assert convert(source(), mask_token_id=64).config.mask_token_id == 64
    with pytest.raises(ValueError, match=r"the mask token '<end>' is in use: it is token 63"):
        convert(source(), mask_token="<end>")
    with pytest.raises(ValueError, match="mask_token_id 66 lies outside an embedding of 64 rows"):
        convert(source(words=None), mask_token_id=66)
    with pytest.raises(ValueError, match="cannot be combined; choose one"):
        convert(source(), sinks=1, softmax="off_by_one")
    with pytest.raises(ValueError, match="softmax is 'softmax1'"):
        convert(source(), sinks=0, softmax="softmax1")  # type: ignore[arg-type]
    quantised = source()
    quantised.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM has quantised weights, .*; load it without"):
        convert(quantised)


def test_a_converted_model_has_the_sampler_that_the_pages_say() -> None:
    shifted, plain = convert("toy-ar", sinks=1), convert("toy-ar", sinks=1, shift=False)
    assert (shifted.config.sampler, shifted.sampler_defaults["remasking"]) == ("dream", "origin")
    assert plain.config.sampler == "llada"


@pytest.mark.parametrize("site", ["attn_out", "mlp_out", "resid"])
def test_hooks_take_the_sites_of_its_layers(site: Any) -> None:
    """The network was not loaded, and so not checked; the pass that finds its sites is made with it."""
    model, ids = convert(source()), torch.arange(3, 9)[None]
    with torch.no_grad(), attach_hooks(model, ablate(site)):
        edited = model(ids).logits
    assert not torch.allclose(edited, model(ids).logits)
