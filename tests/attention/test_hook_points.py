"""Hook points of transformers models that no family of ours is made of."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    BloomForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import dlm_lens
from dlm_lens.attention import (
    HOOK_POINTS,
    add_hook_points,
    attach_hooks,
    attention_blocks,
    attention_of,
    check_hook_points,
    hook_point,
    hooked_attentions,
)
from dlm_lens.hooks import ablate, mask_positions, mask_top_sinks
from dlm_lens.testing import tiny

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "olmoe": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32},
    "modernbert": {"global_attn_every_n_layers": 3},
}
FUSED = ("gpt2", "gpt_neox", "phi3", "modernbert", "bert")
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "olmo3", "olmoe", "mistral",
    "gpt_oss", "granite", "cohere2", "smollm3", "starcoder2", "opt", *FUSED,
)  # fmt: skip
IDS = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(1))
CONTENT = torch.ones_like(IDS)
CONTENT[0, :5] = 0
INPUTS = {"input_ids": IDS, "attention_mask": CONTENT, "use_cache": False}


def build(kind: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**BASE, **EXTRA.get(kind, {}), **changes})
    auto = AutoModelForMaskedLM if kind in ("modernbert", "bert") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation="eager").eval()
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones: a norm that is left out would not show
                weight.data.normal_(0.8, 0.3)
            elif "proj" in name or "attn" in name:
                weight.data.mul_(5)  # attention far from even
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**INPUTS).logits
    return found[CONTENT.bool()]


def plain(model: Any) -> None:
    """The fused function, where the architecture has it."""
    if type(model)._supports_sdpa:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_idle_hook_points_and_patterns_equal_transformers_own_attention_to_the_bit(kind: str) -> None:
    model = build(kind)
    with torch.no_grad():
        eager = model(**INPUTS, output_attentions=True)
    plain(model)
    without = logits(model)
    add_hook_points(model)
    assert torch.equal(logits(model), without)
    patterns: list[Tensor] = []
    for attention in hooked_attentions(model):
        attention.hook_pattern.register_forward_hook(lambda module, inputs, value: patterns.append(value))
    listening, expected = logits(model), eager.logits[CONTENT.bool()]
    if kind == "olmoe":
        # Queries of padding, which see nothing, differ; they change how the experts' products are grouped.
        torch.testing.assert_close(listening, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(listening, expected)
    assert len(patterns) == len(hooked_attentions(model)) == 3
    for got, wanted in zip(patterns, eager.attentions, strict=True):
        seen = CONTENT.bool()[:, None, :, None].expand_as(got)
        if kind == "olmoe":
            torch.testing.assert_close(got[seen], wanted[seen], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(got[seen], wanted[seen])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_edited_pattern_mixes_the_values_as_in_float64(kind: str) -> None:
    """z = pattern v, by hand in float64 from the edited pattern and the values that the hook points show."""
    model = add_hook_points(build(kind))
    attention, kept = hooked_attentions(model)[1], {}

    def edit(module: nn.Module, inputs: Any, pattern: Tensor) -> Tensor:
        kept["pattern"] = pattern * torch.linspace(0, 2, pattern.shape[-1])
        return kept["pattern"]

    before = logits(model)
    attention.hook_pattern.register_forward_hook(edit)
    for name in ("v", "z"):
        hook_point(attention, name).register_forward_hook(
            lambda module, inputs, value, name=name: kept.__setitem__(name, value)
        )
    after = logits(model)
    values = kept["v"].double().repeat_interleave(kept["z"].shape[2] // kept["v"].shape[2], 2)
    expected = torch.einsum("bhqk,bkhd->bqhd", kept["pattern"].double(), values)
    # float32 sums over 24 keys of values of order 10.
    torch.testing.assert_close(kept["z"].double(), expected, rtol=1e-5, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_queries_and_keys_before_rotation_become_those_after_it(kind: str) -> None:
    """An edit of q reaches rot_q: with q times 2, the query after a linear rotation is twice what it was."""
    model = add_hook_points(build(kind))
    attention, seen = hooked_attentions(model)[0], []
    if kind in FUSED:
        assert not hasattr(attention, "hook_q")
        with pytest.raises(ValueError, match=r"has no hook point 'q': it has v, rot_q, rot_k, scores, pattern, z"):
            hook_point(attention, "q")
        return
    for name in ("q", "k"):
        hook_point(attention, f"rot_{name}").register_forward_hook(lambda m, i, value: seen.append(value))
    logits(model)
    for name in ("q", "k"):
        hook_point(attention, name).register_forward_hook(lambda m, i, value: value * 2)
    logits(model)
    for once, twice in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "gpt2"])
def test_columns_are_hidden_in_stream_as_in_the_pattern(kind: str) -> None:
    """Under windows, soft caps and learned sink logits; with a hook that reads the pattern, it is formed."""
    model = add_hook_points(build(kind))
    plain(model)
    for hook in (mask_top_sinks(2), mask_positions(7), mask_top_sinks(2, stage="after")):
        with attach_hooks(model, hook):
            streamed = logits(model)
            handles = [
                attention.hook_pattern.register_forward_hook(lambda m, i, value: None)
                for attention in hooked_attentions(model)
            ]
            formed = logits(model)
            for handle in handles:
                handle.remove()
        # Two kernels in float32; logits of order 1.
        torch.testing.assert_close(streamed, formed, rtol=1e-4, atol=1e-4)
        assert (streamed - logits(model)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2", "gpt2", "gpt_neox"])
def test_what_attention_and_mlp_add_is_what_a_layer_adds(kind: str) -> None:
    """Without attention's and the MLP's part a layer leaves the residual stream as it was."""
    model = add_hook_points(build(kind))
    check_hook_points(model)
    kept: dict[str, Tensor] = {}
    block = attention_blocks(model)[1]
    block.register_forward_pre_hook(
        lambda m, args, kwargs: kept.__setitem__("before", args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    block.register_forward_hook(
        lambda m, i, out: kept.__setitem__("after", out if isinstance(out, Tensor) else out[0])
    )
    with attach_hooks(model, ablate("attn_out"), ablate("mlp_out"), layers=[1]):
        logits(model)
    assert torch.equal(kept["after"], kept["before"])


def test_a_layer_that_scales_what_it_adds_has_no_such_site() -> None:
    model = add_hook_points(build("granite", residual_multiplier=0.5))
    check_hook_points(model)
    with (
        pytest.raises(ValueError, match="attn_out is no hook point of it"),
        attach_hooks(model, ablate("attn_out")),
    ):
        pass


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_generate_with_a_cache_shows_each_query_and_all_keys(kind: str) -> None:
    model = build(kind)
    plain(model)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS[1:])}
    expected = model.generate(IDS[1:], **options)
    add_hook_points(model)
    assert torch.equal(model.generate(IDS[1:], **options), expected)
    patterns: list[Tensor] = []
    hooked_attentions(model)[0].hook_pattern.register_forward_hook(lambda m, i, value: patterns.append(value))
    assert torch.equal(model.generate(IDS[1:], **options), expected)
    keys = [24, 8, 8, 8] if kind == "gemma2" else [24, 25, 26, 27]  # layer 0 of Gemma 2 has a window of 8
    assert [tuple(pattern.shape[2:]) for pattern in patterns] == list(zip([24, 1, 1, 1], keys, strict=True))
    for pattern in patterns:
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:3]))


def test_an_attention_that_bypasses_the_interface_is_refused_by_name() -> None:
    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64))
    with pytest.raises(
        ValueError, match=r"BloomAttention \(transformer.h.0.self_attention\) computes attention without"
    ):
        add_hook_points(model)


T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("encoder", "kind"), [("local", "LongT5LocalAttention"), ("transient-global", "LongT5TransientGlobalAttention")]
)
def test_projections_named_by_letters_are_seen_in_an_attention_that_bypasses_the_interface(
    encoder: str, kind: str
) -> None:
    config = AutoConfig.for_model("longt5", **T5, local_radius=4, encoder_attention_type=encoder)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(ValueError, match=rf"{kind} \(encoder\.block\.0.*\) computes attention without"):
        add_hook_points(model)
    assert not hooked_attentions(model)


@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "switch_transformers"])
def test_projections_named_by_letters_are_hooked_where_the_interface_is_called(kind: str) -> None:
    model = add_hook_points(AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **T5)))
    assert len(hooked_attentions(model)) == 3


class OwnForward(LlamaAttention):
    """An attention that computes everything itself."""

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name() -> None:
    model = build("llama")
    model.model.layers[1].self_attn = OwnForward(model.config, 1)
    with pytest.raises(ValueError, match=r"OwnForward \(model.layers.1.self_attn\) computes attention without"):
        add_hook_points(model)


class Twice(LlamaAttention):
    """An attention that attends twice, as differential attention does."""

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        super().forward(hidden_states, **options)
        return super().forward(hidden_states, **options)


def test_an_attention_that_attends_twice_is_refused_by_the_check() -> None:
    model = build("llama")
    model.model.layers[1].self_attn = Twice(model.config, 1)
    add_hook_points(model)
    with pytest.raises(ValueError, match="Twice calls its attention function 2 times in a forward pass"):
        check_hook_points(model)


class Turned(LlamaAttention):
    """An attention whose queries at position 0 are not those of its projection."""

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Any:
        cos, sin = position_embeddings
        return super().forward(hidden_states, position_embeddings=(-cos, sin), **options)


def test_the_check_takes_away_a_query_that_is_not_the_one_that_is_rotated() -> None:
    model = build("llama")
    weights = model.model.layers[0].self_attn.state_dict()
    model.model.layers[0].self_attn = Turned(model.config, 0)
    model.model.layers[0].self_attn.load_state_dict(weights)
    add_hook_points(model)
    assert hasattr(hooked_attentions(model)[0], "hook_q")
    check_hook_points(model)
    assert not any(hasattr(attention, "hook_q") for attention in hooked_attentions(model))


@pytest.mark.parametrize("layers", [[0], [0, 1, 2]])
def test_the_check_keeps_queries_of_zeros(layers: list[int]) -> None:
    """Two vectors of zeros have no angle between them, and none that differs."""
    model = build("llama")
    for layer in layers:
        torch.nn.init.zeros_(model.model.layers[layer].self_attn.q_proj.weight)
    add_hook_points(model)
    check_hook_points(model)
    assert all(hasattr(attention, "hook_q") for attention in hooked_attentions(model))


class Deaf(LlamaAttention):
    """An attention whose output is left out of the residual stream."""

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        output, pattern = super().forward(hidden_states, **options)
        return output * 0, pattern


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_that_does_not_reach_the_logits_is_refused_by_the_check(dtype: torch.dtype) -> None:
    model = build("llama")
    model.model.layers[0].self_attn = Deaf(model.config, 0)
    add_hook_points(model.to(dtype))
    with pytest.raises(ValueError, match="an edit of the pattern of Deaf does not reach the logits of Llama"):
        check_hook_points(model)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_check_passes_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    check_hook_points(add_hook_points(build(kind).to(dtype)))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_copies_and_pickles_have_hook_points_of_their_own(kind: str) -> None:
    model = add_hook_points(build(kind))
    expected = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert torch.equal(logits(twin), expected)
        seen: list[Tensor] = []
        for name in HOOK_POINTS:
            if hasattr(hooked_attentions(twin)[0], f"hook_{name}"):
                hook_point(hooked_attentions(twin)[0], name).register_forward_hook(
                    lambda m, i, value, seen=seen: seen.append(value)
                )
        logits(model)
        assert not seen
        logits(twin)
        assert len(seen) == (6 if kind in FUSED else 8)
        twin.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
        model.set_attn_implementation("sdpa")
        assert twin.config._attn_implementation == "eager"
        model.set_attn_implementation("eager")


class Added(nn.Module):
    """A projection as LoRA leaves it: the old one, and something on top."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.base_layer(hidden_states) + 1


def test_hook_q_sees_what_a_projection_that_was_replaced_computes() -> None:
    model = add_hook_points(build("llama"))
    attention = hooked_attentions(model)[0]
    attention.q_proj = Added(attention.q_proj)
    seen: dict[str, Tensor] = {}
    for name in ("q", "rot_q"):
        hook_point(attention, name).register_forward_hook(lambda m, i, value, name=name: seen.update({name: value}))
    logits(model)
    # Position 0 is not rotated.
    torch.testing.assert_close(seen["rot_q"][1, 0], seen["q"][1, 0])


def test_a_projection_that_is_replaced_under_a_hook_is_a_sentence() -> None:
    model = add_hook_points(build("llama"))
    attention = hooked_attentions(model)[0]
    handle = attention.hook_q.register_forward_hook(lambda m, i, value: None)
    attention.q_proj = Added(attention.q_proj)
    with pytest.raises(ValueError, match="the q_proj of LlamaAttention was replaced after a hook was put on"):
        logits(model)
    handle.remove()
    handle.remove()
    logits(model)


def test_nothing_hangs_on_a_model_while_nothing_listens() -> None:
    model = add_hook_points(build("llama"))
    hooks = [hooked_attentions(model)[0].hook_q.register_forward_hook(lambda m, i, value: None) for _ in range(2)]
    with attach_hooks(model, ablate("k")):
        logits(model)
    for hook in hooks:
        assert any(module._forward_hooks for module in model.modules())
        hook.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llada", "dream", "smdm", "sink_qwen", "diffugpt"])
def test_family_models_keep_the_classes_and_forwards_of_transformers(family: str) -> None:
    attention = attention_of(attention_blocks(tiny(family))[0])
    assert type(attention).__module__.startswith("transformers.models.")
    assert "forward" not in vars(attention)


def test_layers_that_were_removed_or_exchanged_are_counted_again() -> None:
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    removed, exchanged = tiny("causal", num_hidden_layers=3), tiny("causal")
    del removed.model.layers[0]
    layers = exchanged.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for model, numbers in ((removed, r"\[1, 2\]"), (exchanged, r"\[1, 0\]")):
        reducers = [dlm_lens.ReceivedAttention(min_viewers=1)]
        with (
            pytest.raises(ValueError, match=f"have the numbers {numbers}: some were removed or exchanged"),
            dlm_lens.record_forward(model, reducers),
        ):
            pass
        dlm_lens.add_hook_points(model)
        patterns: list[Tensor] = []
        hooks = [
            layer.self_attn.hook_pattern.register_forward_hook(lambda module, args, out: patterns.append(out))  # noqa: B023
            for layer in model.model.layers
        ]
        with torch.no_grad(), dlm_lens.record_forward(model, reducers) as rec:
            model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        even = (torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]).sum(0)
        for index, pattern in enumerate(patterns):
            # Sums of a dozen float32 products in another order
            torch.testing.assert_close(rec.received[0, 0, index], pattern[0].sum(-2) / even, rtol=1e-5, atol=1e-5)


BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
GEMMA = {**BASE, "query_pre_attn_scalar": 16, "sliding_window": 8}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": T5, "mt5": T5, "umt5": T5,
    "switch_transformers": {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA},
    **dict.fromkeys(("m2m_100", "marian", "pegasus", "blenderbot", "bart"), BART),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_an_encoder_decoder_is_checked_with_tokens_of_both(kind: str) -> None:
    torch.manual_seed(0)
    ends = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{**ENCODER_DECODERS[kind], **ends, "decoder_start_token_id": 0})
    model = add_hook_points(AutoModelForSeq2SeqLM.from_config(config).eval())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    check_hook_points(model)
    # Patterns that are not softmax(scores) are still found.
    hooked_attentions(model)[-1].hook_pattern.register_forward_hook(lambda _m, _i, pattern: pattern.flip(-1) * 0.5)
    with pytest.raises(ValueError, match="cannot be hooked exactly"):
        check_hook_points(model)


def test_eager_is_the_explicit_function_whose_softmax_is_in_float32() -> None:
    own = build("gpt_oss").bfloat16()
    models = [add_hook_points(copy.deepcopy(own)) for _ in range(2)]
    for model, name in zip(models, ("eager", "hooked"), strict=True):
        model.set_attn_implementation(name)
    eager, hooked = map(logits, models)
    assert torch.equal(eager, hooked)
    assert not torch.equal(eager, logits(own))  # its own softmax is in bfloat16
    torch.testing.assert_close(logits(models[0].float()), logits(own.float()), rtol=1e-4, atol=1e-4)
