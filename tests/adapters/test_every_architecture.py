"""Every causal and masked LM of transformers, small and random: it is computed as transformers does, or refused."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import dlm_lens as dl
from dlm_lens.adapters.head import final_norm, head_logits
from dlm_lens.attention import attention_blocks, check_hook_points, decoder_of
from dlm_lens.hooks import ablate
from dlm_lens.recording.reducers.norms import ResidualNorm
from tests.adapters.small_architectures import (
    IDS,
    MASKED_TYPES,
    MODEL_TYPES,
    PAGES_OF_5_24,
    SINCE_5_24,
    small_model,
    values_of,
)

REASONS = {
    "has no attention: there is nothing to add": "falcon_mamba mamba rwkv",
    "computes attention without transformers' attention interface": (
        "bailing_hybrid bloom codegen falcon git gpt_neo gpt_neox_japanese gptj kimi_linear minimax mpt trocr xglm"
    ),
    "has no attention module that calls transformers' attention interface": "cpmant openai-gpt xlnet",
    "calls its attention function 0 times in a forward pass": (  # attention to an encoder or to images without them
        "bigbird_pegasus blenderbot blenderbot-small marian pegasus phi4_multimodal plbart whisper"
    ),
    "calls its attention function 2 times in a forward pass": "diffllama",
    "calls its attention function 6 times in a forward pass": "hrm_text",
    "computes something else for the attention implementation 'sdpa'": (
        "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text"
    ),
    "no family loads model_type": (  # encoders, and classes whose files have the model type of a part
        "bart bert big_bird camembert data2vec-text electra emu3 ernie mbart megatron-bert mllama mvp rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl"
    ),
    "the last token changes what BertGenerationDecoder computes before it": "bert-generation",
    "are not its output embedding applied to its decoder's states": "inkling_text recurrent_gemma",
    "differ by .* with idle hook points": "inkling2_text",
    "describes a network that cannot be built": "prophetnet",
}
REFUSED = {model_type: reason for reason, types in REASONS.items() for model_type in types.split()}
"""Model types -> why they are not loaded."""
if SINCE_5_24:
    del REFUSED["codegen"], REFUSED["gptj"]  # which call attention through the interface since

WITHOUT_STATISTICS = {
    "deepseek_v4": "heavily_compressed_attention",
    "llama4": "chunked_attention",
    "llama4_text": "chunked_attention",
    "longcat_flash": "2 attentions",
}
"""Model types that are loaded and decoded -> what their layers have, whose attention has no statistics here."""

_NOT_BUILT = (
    "blt cohere_compass_text dots3_note gemma3n gemma4_assistant gemma4_unified_assistant "
    "mamba2 musicgen musicgen_melody qwen4_exp qwen4_exp_text reformer xlstm xmod"
)
NOT_BUILT = frozenset(_NOT_BUILT.split()) | (
    {"dory", "inkling2_loop_text", "inkling2_text"} if SINCE_5_24 else set()
)
"""Model types of which `small_model` builds no network: large parts, other packages, sizes that do not agree."""

QUICK = frozenset(
    {"codegen", "deepseek_v3", "deepseek_v4", "falcon_h1", "gemma3n_text", "gemma4_text", "qwen3_next"}
)
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODEL_TYPES]

NO_STREAM = frozenset({"dbrx", "deepseek_v4", "gemma3n_text", "zamba", "zamba2"})
"""Model types of which no layer with attention passes on one residual stream: no lens and no hook reads it."""

WITHOUT_TRACES = {
    "modernbert-decoder": "calls another module lm_head",
    **dict.fromkeys(("dbrx", "zamba", "zamba2"), "a trace reads that of lm.layers"),
    "longcat_flash": "has 2 attentions",
}
"""Model types of which `DiffusionLM` says why it does not take them."""

OTHER_PATTERNS = frozenset({"granite_swa", "granitemoe_swa", "minicpm3"})
"""transformers' own `output_attentions` are other numbers: Granite's leave out the share of the learned sink logit,
which our patterns have, and MiniCPM3's eager attention fails."""

SHORT, LONG = IDS[0, :5].tolist(), IDS[1, :9].tolist()
NEW = 4


def received(patterns: list[Tensor]) -> Tensor:
    """e_j of every layer and head: what a key receives, over what uniform attention would give it; float64.

    Queries see the keys to which some head of the layer gives attention above 0 (one head's may underflow).
    """
    whole = torch.stack([pattern[0].double() for pattern in patterns])
    visible = (whole > 0).any(1, keepdim=True).double().expand_as(whole)
    return whole.sum(-2) / (visible / visible.sum(-1, keepdim=True)).sum(-2)


def check_decoding(model: Any, loaded: Any) -> None:
    """Greedy decoding is transformers', alone and in a batch of two lengths."""
    both = dl.denoise(loaded, [SHORT, LONG], gen_length=NEW).canvases[-1]
    for row, prompt in enumerate((SHORT, LONG)):
        ids = torch.tensor([prompt])
        theirs = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        alone = dl.denoise(loaded, [prompt], gen_length=NEW).canvases[-1][0, len(prompt) :]
        written = len(theirs)
        assert torch.equal(alone[:written], theirs)
        assert torch.equal(both[row, len(LONG) :][:written], theirs)


def check_lens(loaded: Any, refused: bool) -> None:
    """What a lens makes of the last layer's stream are the model's logits."""
    prompt = [IDS[0].tolist()]
    if refused:
        with pytest.raises(ValueError, match="does not pass on the residual stream"):
            dl.probes.logit_lens(loaded, dl.denoise(loaded, prompt, gen_length=1))
        with pytest.raises(ValueError, match="does not pass on the residual stream"):
            dl.denoise(loaded, prompt, gen_length=1, hooks=[ablate("resid")])
        return
    block, stream = attention_blocks(loaded)[-1], []
    others = [
        each for each in decoder_of(loaded).modules() if isinstance(each, nn.ModuleList) and block in list(each)
    ]
    last = others[0][-1] if others else block  # the last layer may have no attention
    handle = last.register_forward_hook(lambda module, args, output: stream.append(output))
    with torch.no_grad():
        logits = loaded(IDS, use_cache=False).logits
        handle.remove()
        states = stream[0] if isinstance(stream[0], Tensor) else stream[0][0]
        read = head_logits(loaded, final_norm(loaded)(states))
    torch.testing.assert_close(read, logits, rtol=1e-4, atol=1e-5)  # one float32 product


def check_trace(loaded: Any) -> None:
    """A traced run is the run."""
    lm = dl.DiffusionLM(loaded)
    with lm.generate([SHORT], gen_length=2) as tracer:
        run = tracer.result.save()
    assert torch.equal(run.canvases, dl.denoise(loaded, [SHORT], gen_length=2).canvases)


def check_statistics(model: Any, loaded: Any) -> None:
    """Recorded received attention is that of transformers' own eager patterns."""
    ours = dl.record(loaded, [IDS[0].tolist()], [dl.ReceivedAttention()], gen_length=1).received[0, 0]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        compare(ours, eager(IDS[:1], output_attentions=True, use_cache=False).attentions)


def check_stream(model: Any, loaded: Any) -> None:
    """Recorded norms of the stream that enters a layer are those of transformers' hidden states."""
    ours = dl.record(loaded, [IDS[0].tolist()], [ResidualNorm()], gen_length=1).residual_norm[0, 0]
    layers = next(
        list(each)
        for each in decoder_of(loaded).modules()
        if isinstance(each, nn.ModuleList) and attention_blocks(loaded)[0] in list(each)
    )
    with torch.no_grad():
        states = model(IDS[:1], output_hidden_states=True, use_cache=False).hidden_states
    wanted = torch.stack([states[layers.index(block)][0].norm(dim=-1) for block in attention_blocks(loaded)])
    torch.testing.assert_close(ours[:, : IDS.shape[1]], wanted, rtol=1e-4, atol=1e-5)  # as `check_lens`


def compare(ours: Tensor, patterns: Sequence[Tensor | None]) -> None:
    """Recorded e_j against those of patterns, for keys that enough queries see."""
    wanted = received([pattern for pattern in patterns if pattern is not None])
    found = ours[..., : IDS.shape[1]].double()
    compared = found.isfinite()
    assert compared.any()
    # Sums of a dozen float32 products with another kernel.
    torch.testing.assert_close(found[compared], wanted[compared], rtol=1e-5, atol=1e-5)


@pytest.mark.in_turn
@pytest.mark.parametrize("model_type", CASES)
def test_it_computes_what_transformers_does_or_is_refused(model_type: str, tmp_path: Path) -> None:
    if model_type in NOT_BUILT:
        pytest.skip("no small network of it can be built here")
    model = small_model(model_type)
    model.save_pretrained(tmp_path)
    if model_type in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[model_type]) as error:
            dl.load(tmp_path)
        assert "\n" not in str(error.value)
        return
    loaded = dl.load(tmp_path)
    check_decoding(model, loaded)
    check_lens(loaded, model_type in NO_STREAM)
    if model_type in WITHOUT_TRACES:
        with pytest.raises(ValueError, match=WITHOUT_TRACES[model_type]):
            dl.DiffusionLM(loaded)
    else:
        check_trace(loaded)
    if model_type in WITHOUT_STATISTICS:
        with pytest.raises(ValueError, match=re.escape(f"has {WITHOUT_STATISTICS[model_type]}")):
            dl.record(loaded, [SHORT], [dl.ReceivedAttention()], gen_length=1)
        return
    if model_type not in OTHER_PATTERNS:
        check_statistics(model, loaded)
    if model_type not in NO_STREAM:
        check_stream(model, loaded)


MASKED_REASONS = {
    "computes attention without transformers' attention interface": (
        "big_bird convbert ibert longformer megatron-bert mpnet mra mvp nystromformer rembert roformer squeezebert "
        "tapas yoso"
    ),
    "has no attention module that calls transformers' attention interface": (
        "deberta deberta-v2 flaubert fnet funnel xlm"
    ),
    "calls its attention function 2 times in a forward pass": "albert",
    r"o_proj\.weight of NeoMMEForMaskedLM holds zeros alone, .* is checked once it is trained": "neomme",
}
MASKED_REFUSED = {model_type: reason for reason, types in MASKED_REASONS.items() for model_type in types.split()}
ENCODER_DECODERS = frozenset({"bart", "mbart"})
MASKED_NOT_BUILT = frozenset("esmc luke modernvbert perceiver reformer ultravbert xmod".split())  # noqa: SIM905
MASKED_QUICK = frozenset({"bart", "layoutlm", "modernbert"})
MASKED_CASES = [
    name if name in MASKED_QUICK else pytest.param(name, marks=pytest.mark.long) for name in MASKED_TYPES
]


@pytest.mark.in_turn
@pytest.mark.parametrize("model_type", MASKED_CASES)
def test_hook_points_of_an_encoder_show_its_patterns_or_are_refused(model_type: str) -> None:
    if model_type in MASKED_NOT_BUILT:
        pytest.skip("no small network of it can be built here")
    plain = small_model(model_type, AutoModelForMaskedLM)
    model = copy.deepcopy(plain)
    if model_type in MASKED_REFUSED:
        with pytest.raises(ValueError, match=MASKED_REFUSED[model_type]):
            check_hook_points(dl.add_hook_points(model))
        return
    check_hook_points(dl.add_hook_points(model))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        if model_type in ENCODER_DECODERS:
            with pytest.raises(ValueError, match="in a decoder and from it to an"), dl.record_forward(model, []):
                pass
            return
        with dl.record_forward(model, [dl.ReceivedAttention()]) as seen:
            model(IDS)
        plain.set_attn_implementation("eager")
        compare(seen.received[0, 0], plain(IDS[:1], output_attentions=True).attentions)


def test_a_layer_that_runs_twice_has_no_statistic() -> None:
    model = dl.add_hook_points(small_model("albert", AutoModelForMaskedLM))
    with (
        dl.record_forward(model, [dl.ReceivedAttention()]),
        pytest.raises(ValueError, match="layer 0 ran twice in one forward pass"),
    ):
        model(IDS)


@PAGES_OF_5_24
def test_the_pages_name_these_numbers() -> None:
    root = Path(__file__).parents[2]
    counts = {}
    for name, types, absent, refused in (
        ("AutoModelForCausalLM", MODEL_TYPES, NOT_BUILT, REFUSED),
        ("AutoModelForMaskedLM", MASKED_TYPES, MASKED_NOT_BUILT, MASKED_REFUSED),
    ):
        built = len(types) - len(absent)
        counts[name] = (len(types), built, built - len(refused), len(refused))
    page = (root / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "`AutoModelFor" in line
    ]
    for name, numbers in counts.items():
        (row,) = [cells[1:] for cells in rows if f"`{name}`" in cells[0]]
        assert row == list(map(str, numbers))
    _, built, compared, _ = counts["AutoModelForCausalLM"]
    for path in ("README.md", "CHANGELOG.md", "docs/families.md"):
        assert f"{compared} causal architectures of transformers" in (root / path).read_text(encoding="utf-8")
    assert f"of {built}\n  that are built" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
    page = (root / "docs/verification.md").read_text(encoding="utf-8")
    types, built, compared, refused = map(sum, zip(*counts.values(), strict=True))
    assert f"{types} model types of transformers, small and random: {built} built, {compared} of them" in page
    assert f"{refused} refused in a sentence" in page


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("gemma3n_text", {"intermediate_size": 96, "activation_sparsity_pattern": None}),
        ("gemma4_text", {}),
    ],
)
def test_layers_that_share_keys_and_values_are_loaded(model_type: str, own: dict[str, Any], tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    values = values_of(model_type, layers=6) | layers | {"num_kv_shared_layers": 2} | own
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = dl.load(tmp_path)
    assert ours.config.num_kv_shared_layers == 2
    with torch.no_grad():
        assert torch.equal(ours(IDS, use_cache=False).logits, theirs(IDS, use_cache=False).logits)


SINK_LOGITS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "deepseek_v4")
VIEWS_OF_Z = ("afmoe", "jetmoe")


@pytest.mark.parametrize("model_type", [*SINK_LOGITS, *VIEWS_OF_Z])
def test_the_function_that_forms_patterns_loads_every_architecture(model_type: str, tmp_path: Path) -> None:
    model = small_model(model_type)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    model.save_pretrained(tmp_path)
    content = torch.ones_like(IDS)
    content[0, :3] = 0
    with torch.no_grad():
        hooked, plain = (
            dl.load(tmp_path, attn_implementation=name)(IDS, attention_mask=content, use_cache=False).logits
            for name in ("hooked", "sdpa")
        )
    # float32 with another kernel.
    torch.testing.assert_close(hooked[content.bool()], plain[content.bool()], rtol=1e-4, atol=1e-4)
