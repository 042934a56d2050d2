"""Layers with several attentions, and the sites of layers that a pass through the model finds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5EncoderModel

import dlm_lens as dl
from dlm_lens.attention import attach_hooks, attention_blocks, check_hook_points, hooked_attentions
from dlm_lens.attention.layers import attentions_of
from dlm_lens.hooks import ablate, freeze_sinks, mask_positions, mask_top_sinks, steer
from tests.adapters.small_architectures import small_model
from tests.attention.test_hook_points import BART, ENCODER_DECODERS, T5, build

IDS, ANSWER = torch.arange(3, 15)[None], torch.arange(20, 28)[None]


def encoder_decoder(kind: str) -> Any:
    ends = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**ENCODER_DECODERS.get(kind, BART), **ends})
    return dl.add_hook_points(AutoModelForSeq2SeqLM.from_config(config).eval())


def patterns_of(model: Any, *hooks: Any, layers: list[int] | None = None) -> dict[str, Tensor]:
    """The pattern of every attention, by its name, under hooks."""
    found: dict[str, Tensor] = {}
    names = [name for name, module in model.named_modules() if module in set(hooked_attentions(model))]
    with torch.no_grad(), attach_hooks(model, *hooks, layers=layers):
        handles = [
            model.get_submodule(name).hook_pattern.register_forward_hook(
                lambda m, i, value, name=name: found.__setitem__(name, value)
            )
            for name in names
        ]
        model(input_ids=IDS, decoder_input_ids=ANSWER)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", [*ENCODER_DECODERS, "mbart", "plbart"])
def test_a_hook_acts_in_every_attention_of_a_layer(kind: str) -> None:
    """The position of a key is the encoder's in attention to the encoder; a layer is the host's own."""
    model = encoder_decoder(kind)
    depths = [len(attentions_of(block)) for block in attention_blocks(model)]
    half = len(depths) // 2
    # T5Gemma's decoder has its own attention and that to the encoder in two modules too.
    assert depths == [1] * half + [2] * half
    found = patterns_of(model, mask_positions(3))
    assert len(found) == sum(depths)
    for name, pattern in found.items():
        assert bool((pattern[..., 3] == 0).all()), name
        assert bool((pattern[..., 4] > 0).any()), name
    last = patterns_of(model, mask_positions(3), layers=[-1])
    hidden = [name for name, pattern in last.items() if bool((pattern[..., 3] == 0).all())]
    assert hidden == list(found)[-2:]


def longcat() -> Any:
    return dl.add_hook_points(small_model("longcat_flash"))


def test_a_hook_acts_in_both_attentions_of_longcat() -> None:
    model = longcat()
    blocks = attention_blocks(model)
    assert blocks == list(model.model.layers)
    with torch.no_grad(), attach_hooks(model, ablate("z"), layers=[1]):
        seen: list[Tensor] = []
        for attention in attentions_of(blocks[1]):
            attention.register_forward_hook(lambda m, i, out: seen.append(out[0]))
        model(IDS)
    assert len(seen) == 2
    assert not any(bool(each.any()) for each in seen)


@pytest.mark.parametrize("hook", [freeze_sinks(dl.sinks.TopK(1), step=1), mask_top_sinks(2, source="clean")])
def test_a_hook_that_keeps_something_for_a_layer_is_refused_where_it_has_two_attentions(hook: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"LongcatFlashDecoderLayer has 2 attentions: take a hook that"),
        attach_hooks(longcat(), hook),
    ):
        pass


def test_a_reader_of_one_attention_of_a_layer_refuses_two() -> None:
    with (
        pytest.raises(ValueError, match=r"has 2 attentions \(self_attn.0, self_attn.1\), and this takes"),
        dl.record_forward(longcat(), [dl.ReceivedAttention()]),
    ):
        pass


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "switch_transformers"])
def test_the_stream_of_t5_is_that_after_the_block(kind: str) -> None:
    model = encoder_decoder(kind)
    check_hook_points(model)
    blocks = attention_blocks(model)
    assert blocks == [*model.encoder.block, *model.decoder.block]
    streams: list[Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda m, i, out: streams.append(out[0]))
    with torch.no_grad():
        model(input_ids=IDS, decoder_input_ids=ANSWER)
        plain = [each.clone() for each in streams]
        with attach_hooks(model, steer(torch.ones(32), site="resid"), layers=[0]):
            streams.clear()
            model(input_ids=IDS, decoder_input_ids=ANSWER)
    # Forward hooks run in the order in which they were registered: `streams` has the values before the edit.
    assert torch.equal(streams[0], plain[0])
    assert not torch.allclose(streams[1], plain[1])


def test_the_stream_of_a_t5_encoder_is_in_its_hidden_states() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("t5", **{**T5, "num_layers": 3, "vocab_size": 120})
    model = dl.add_hook_points(T5EncoderModel(config).eval())
    check_hook_points(model)
    streams: list[Tensor] = []
    for block in attention_blocks(model):
        assert block.hook_sites == {"resid"}  # its sublayers add for themselves
        block.register_forward_hook(lambda m, i, out: streams.append(out[0]))
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
    for stream, state in zip(streams[:-1], states[1:-1], strict=True):  # the last one is normed
        assert torch.equal(stream, state)


@pytest.mark.parametrize("site", ["attn_out", "mlp_out", "resid"])
def test_a_site_of_a_layer_is_refused_before_the_check(site: Any) -> None:
    model = dl.add_hook_points(build("granite", residual_multiplier=0.5))
    message = rf"GraniteDecoderLayer has the site {site} is not known .*: call dlm_lens.attention.check_hook_points"
    with pytest.raises(ValueError, match=message), attach_hooks(model, ablate(site)):
        pass
    with attach_hooks(model, ablate("z")):  # a hook point of attention
        pass
    check_hook_points(model)
    if site == "resid":
        with attach_hooks(model, ablate(site)):
            pass
        return
    with pytest.raises(ValueError, match=f"{site} is no hook point of it"), attach_hooks(model, ablate(site)):
        pass


def test_the_stream_of_bert_is_no_site_of_its_attention_part() -> None:
    config = AutoConfig.for_model("bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = dl.add_hook_points(AutoModel.from_config(config).eval())
    hook = steer(torch.ones(32), site="resid")
    for message in (
        "call dlm_lens.attention.check_hook_points",
        "BertAttention does not pass on the residual stream",
    ):
        with pytest.raises(ValueError, match=message), attach_hooks(model, hook, layers=[-1]):
            pass
        check_hook_points(model)


def test_sites_of_a_model_that_was_loaded_or_built_for_tests_are_known(tmp_path: Any) -> None:
    small_model("llama").save_pretrained(tmp_path)
    for model in (dl.load(tmp_path), dl.testing.tiny("causal")):
        assert all(block.hook_sites == {"attn_out", "mlp_out", "resid"} for block in attention_blocks(model))
    unchecked = dl.load(tmp_path, check=False)
    with pytest.raises(ValueError, match="check_hook_points"), attach_hooks(unchecked, ablate("resid")):
        pass


def test_gpt2_with_attention_to_an_encoder_has_two_attentions_in_a_layer() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64, add_cross_attention=True)
    model = dl.add_hook_points(AutoModelForCausalLM.from_config(config).eval())
    assert [len(attentions_of(block)) for block in attention_blocks(model)] == [2, 2]
