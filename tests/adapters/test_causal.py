"""Causal LMs of transformers that no family of ours is made of: loaded, decoded, recorded, read."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import dlm_lens as dl
from dlm_lens.adapters.config_fields import built_config
from dlm_lens.adapters.model_preparation import check_model
from dlm_lens.adapters.weight_headers import read_header
from dlm_lens.attention import hooked_attentions
from dlm_lens.hooks import mask_top_sinks
from tests.adapters.small_architectures import small_model
from tests.attention.test_hook_points import build

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "sliding_window": None},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "gemma2": {"final_logit_softcapping": 2.0},
}
KINDS = (
    "qwen3", "gemma2", "gemma3_text", "olmo2", "gpt2", "gpt_neox", "phi3", "granite", "cohere2", "gpt_oss",
    "mistral", "qwen3_moe", "mixtral", "opt", "olmo", "gpt_bigcode", "jetmoe",
)  # fmt: skip
FULL = ("qwen3", "olmo2", "gpt2", "gpt_neox", "granite", "qwen3_moe", "mixtral", "olmo")
"""Every layer attends fully."""

SOME: tuple[Any, ...] = tuple(
    kind
    if kind in ("gemma2", "gpt2", "granite", "gpt_oss", "mixtral")
    else pytest.param(kind, marks=pytest.mark.long)
    for kind in KINDS
)

PROMPT = torch.randint(3, 120, (2, 11), generator=torch.Generator().manual_seed(3))
CONTENT = torch.ones_like(PROMPT)
CONTENT[0, :4] = 0
LENGTH = 8


@cache
def checkpoint(kind: str) -> tuple[Any, Any]:
    """The model as transformers has it, and the one that `load` makes of its files.

    The fourth token that the first row writes ends the text.
    """
    model = build(kind, **CHANGES.get(kind, {}))
    model.config.eos_token_id = model.generation_config.eos_token_id = int(greedy(model, True)[0, 14])
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return model, dl.load(directory)


def greedy(model: Any, use_cache: bool) -> Tensor:
    options = {"attention_mask": CONTENT, "max_new_tokens": LENGTH, "do_sample": False, "use_cache": use_cache}
    found: Tensor = model.generate(PROMPT, **options)
    return found


def plain_logits(model: Any, canvas: Tensor, row: int, stop: int) -> Tensor:
    """What transformers' own model says at the last of `stop` positions of a row, alone and without padding."""
    start = int((CONTENT[row] == 0).sum())
    with torch.no_grad():
        return model(input_ids=canvas[row : row + 1, start:stop], use_cache=False).logits[0].double()


def until_end(row: Tensor, end: int) -> list[int]:
    written: list[int] = row[PROMPT.shape[1] :].tolist()
    return written[: written.index(end) + 1] if end in written else written


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_load_and_denoise_are_transformers_own_model_and_greedy_generate(kind: str) -> None:
    model, loaded = checkpoint(kind)
    assert type(loaded) is type(model)
    # Another kernel (eager against sdpa) in float32.
    torch.testing.assert_close(
        plain_logits(loaded, PROMPT, 1, 11), plain_logits(model, PROMPT, 1, 11), rtol=1e-4, atol=1e-5
    )
    end = model.config.eos_token_id
    for use_cache in (True, False):
        ours = dl.denoise(loaded, PROMPT, CONTENT, gen_length=LENGTH, use_cache=use_cache).canvases[-1]
        theirs = greedy(model, use_cache)
        for row in range(2):
            assert until_end(ours[row], end) == until_end(theirs[row], end)
        assert len(until_end(ours[0], end)) <= 4


@pytest.mark.parametrize("kind", SOME)
def test_hidden_sinks_are_the_same_in_stream_and_in_the_pattern(kind: str) -> None:
    _, model = checkpoint(kind)
    hook = mask_top_sinks(2)
    streamed = dl.denoise(model, PROMPT, CONTENT, gen_length=4, hooks=[hook])
    handles = [a.hook_pattern.register_forward_hook(lambda m, i, value: None) for a in hooked_attentions(model)]
    formed = dl.denoise(model, PROMPT, CONTENT, gen_length=4, hooks=[hook])
    for handle in handles:
        handle.remove()
    assert torch.equal(streamed.canvases[-1], formed.canvases[-1])
    written = streamed.confidence.isfinite()
    assert written.any()
    # Two kernels in float32.
    torch.testing.assert_close(streamed.confidence[written], formed.confidence[written], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", SOME)
def test_the_last_layer_of_the_logit_lens_is_the_models_own_output(kind: str) -> None:
    """Final norm, then the head with its soft cap, scale or divisor."""
    model, loaded = checkpoint(kind)
    run = dl.denoise(loaded, PROMPT, CONTENT, gen_length=3, use_cache=False)
    lens = dl.logit_lens(loaded, run, [4, 9, 10])
    assert len(lens.step) >= 6
    for entry, (step, row, position) in enumerate(zip(lens.step, lens.batch, lens.position, strict=True)):
        logits = plain_logits(model, run.canvases[int(step)], int(row), int(position) + 1)[-1]
        own = logits.softmax(-1).sort(descending=True).values[:5]
        torch.testing.assert_close(lens.top_probabilities[entry, -1].double(), own, rtol=1e-4, atol=1e-6)
    assert float((lens.top_probabilities[:, 0] - lens.top_probabilities[:, -1]).abs().max()) > 1e-4


@pytest.mark.parametrize("kind", SOME)
def test_log_likelihood_is_the_chain_rule(kind: str) -> None:
    model, loaded = checkpoint(kind)
    found = dl.log_likelihood(loaded, PROMPT[1:, :6], PROMPT[1:, 6:]).value
    logs = plain_logits(model, PROMPT, 1, 11).log_softmax(-1)
    expected = sum(float(logs[i - 1, PROMPT[1, i]]) for i in range(6, 11))
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in SOME if getattr(kind, "values", (kind,))[0] in FULL])
def test_received_attention_is_the_column_sum_of_eager_patterns(kind: str) -> None:
    """score_j = r_j / e_j with e_j = sum_i M_ij / sum_k M_ik, by hand in float64."""
    model, loaded = checkpoint(kind)
    recording = dl.record(
        loaded, [PROMPT[1].tolist()], reducers=[dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()], gen_length=2
    )
    for step in range(len(recording.received)):  # the first token may end the text
        ids = recording.tokens[step, 0, : 11 + step]
        with torch.no_grad():
            patterns = model(input_ids=ids[None], use_cache=False, output_attentions=True).attentions
        seen = torch.ones(len(ids), len(ids), dtype=torch.float64).tril()
        even = (seen / seen.sum(-1, keepdim=True)).sum(0)
        for layer, pattern in enumerate(patterns):
            expected = pattern[0].double().sum(1) / even
            found = recording.received[step, 0, layer, :, : len(ids)].double()
            # Sums in float32 over at most 12 queries.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    sinks = dl.find_sinks(recording, dl.AboveMean(eps=1e-4))
    assert bool(sinks.is_sink.any())
    assert "ValueNorms" in repr(dl.value_norms(recording, sinks))


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "granite", "qwen3_moe", "gpt_oss"])
def test_compare_and_replay_run_on_any_causal_model(kind: str) -> None:
    """The hooked half of compare is the run under those hooks; replay sees what they change."""
    _, model = checkpoint(kind)
    run = dl.denoise(model, PROMPT, CONTENT, gen_length=3, use_cache=False)
    pair = dl.compare(model, PROMPT[1:].tolist(), hooks=[mask_top_sinks(2)], gen_length=3)
    alone = dl.denoise(model, PROMPT[1:].tolist(), gen_length=3, hooks=[mask_top_sinks(2)])
    assert torch.equal(pair.hooked.canvases[-1], alone.canvases[-1])
    hidden = dl.replay(model, run, [mask_top_sinks(2)], attention=False)
    assert float(hidden.confidence_change.nan_to_num(0).abs().max()) > 1e-6


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bert", {}, "no family loads model_type 'bert'; .*; load an encoder .*, and use dlm_lens.add_hook_points"),
        ("bloom", {}, "BloomAttention .* computes attention without transformers' attention .*; take a model of"),
        ("xglm", {}, "XGLMAttention .* computes attention without transformers' attention interface"),
        ("mamba", {}, "MambaForCausalLM has no attention module that calls .* cannot be hooked; take a model of"),
        ("diffllama", {}, "DiffLlamaAttention calls its attention function 2 times in a forward pass"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.attention.test_hook_points import BASE

    if kind == "bert":
        AutoConfig.for_model(kind, **BASE).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").touch()
    else:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASE, **changes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        dl.load(tmp_path)


def altered(directory: Path, kind: str, **config: Any) -> Path:
    """A checkpoint with other values in its config."""
    build(kind, **CHANGES.get(kind, {})).save_pretrained(directory)
    values = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_a_config_that_does_not_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a few tokens do not pass through Qwen2ForCausalLM \(.*chunked_attention"
    ):
        dl.load(altered(tmp_path, "qwen2", layer_types=["chunked_attention"] * 3))


def test_the_check_costs_three_passes_and_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle by way of the decoder, plain, and one that reads and edits patterns; on the toy together under 50 ms."""
    model, _ = checkpoint("qwen3")
    model.save_pretrained(tmp_path)
    passes: list[int] = []
    original = type(model.model).forward

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        passes.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(type(model.model), "forward", counted)
    unchecked = dl.load(tmp_path, check=False)
    assert not passes
    check_model(unchecked)
    assert len(passes) == 3


def test_the_text_ends_as_in_generate(tmp_path: Path) -> None:
    """Chat models name the end of a turn in generation_config.json alone (Phi-3: 32007; config.json says 32000)."""
    model = build("llama")
    third = int(greedy(model, True)[1, 13])
    model.config.eos_token_id, model.generation_config.eos_token_id = 127, [127, third, 10**6]
    model.save_pretrained(tmp_path)
    loaded = dl.load(tmp_path)
    run = dl.denoise(loaded, PROMPT[1:], gen_length=LENGTH)
    theirs = model.generate(PROMPT[1:], max_new_tokens=LENGTH, do_sample=False)
    assert theirs.shape[1] < PROMPT.shape[1] + LENGTH
    assert run.tokens.equal(theirs)
    assert run.eos_token_ids == (127, third)
    given = dl.load(tmp_path, eos_token_id=126)
    assert (given.config.eos_token_id, given.generation_config.eos_token_id) == (126, 126)
    assert dl.denoise(given, PROMPT[1:], gen_length=LENGTH).steps == LENGTH
    file = tmp_path / "generation_config.json"
    for beyond in (10**9, [10**6, 10**9]):
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": beyond}))
        with pytest.raises(
            ValueError, match=r"generation_config.json of .* eos_token_id = .*, which has no row in"
        ):
            dl.load(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": "x"}))
    with pytest.raises(
        ValueError, match=r"generation_config.json of .* eos_token_id = 'x'; it must be the id of a"
    ):
        dl.load(tmp_path)


def test_files_with_tensors_that_transformers_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers splits fused projections of some architectures, Sarvam's in 5.24; their parts were missing."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Split, WeightConverter

    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    targets = ["q_proj", "k_proj", "v_proj"]
    fused = WeightConverter(source_patterns="query_key_value", target_patterns=targets, operations=[Split(dim=0)])
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", {**mapping, "qwen3": [fused]})
    model, _ = checkpoint("qwen3")
    model.save_pretrained(tmp_path)
    names = read_header(tmp_path / "model.safetensors")
    assert "model.layers.0.self_attn.query_key_value.weight" in names
    assert not [name for name in names if "q_proj" in name or "v_proj" in name]
    loaded: Any = dl.load(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_configs_without_a_padding_token() -> None:
    """CodeGen's class has no such field, which raised an AttributeError; transformers 5.24 lets it be loaded."""
    from transformers import CodeGenConfig

    assert not hasattr(CodeGenConfig(), "pad_token_id")
    assert built_config(CodeGenConfig, {"model_type": "codegen"}, "a config").pad_token_id is None


def test_a_class_that_ignores_the_layer_after_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bailing's patterns name that layer by the config; of a network of one layer they named the second."""
    model, _ = checkpoint("qwen3")
    kind, count = type(model), model.config.num_hidden_layers
    begin = kind.__init__

    def init(self: Any, config: Any) -> None:
        begin(self, config)
        self._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{config.num_hidden_layers}\."}

    model.save_pretrained(tmp_path)
    monkeypatch.setattr(kind, "__init__", init)
    loaded: Any = dl.load(tmp_path)
    assert loaded.config.num_hidden_layers == count > 1
    tensors = load_file(tmp_path / "model.safetensors")
    more = {f"model.layers.{count}.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"].clone()}
    save_file({**tensors, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    assert dl.load(tmp_path).config.num_hidden_layers == count


def test_attention_to_an_encoder_that_load_leaves_out_is_named(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model("gpt2", **sizes, add_cross_attention=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"says add_cross_attention = true, and .*: load it with transformers"):
        dl.load(tmp_path)


def test_a_lack_of_layers_is_told_by_the_field_of_the_file(tmp_path: Path) -> None:
    model = small_model("longcat_flash")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"says num_layers = 2, the files hold 1 layers: missing keys of"):
        dl.load(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 10**18}))
    with pytest.raises(ValueError, match=r"says num_layers = .*; it must be a whole number from 1 to 1000"):
        dl.load(tmp_path)


def test_a_network_of_endless_cycles_is_refused_before_it_runs(tmp_path: Path) -> None:
    small_model("hrm_text").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"H_cycles": 10**6, "num_hidden_layers": 2}
    del values["num_layers_per_stack"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"describes a pass through \d+ layers; 1000 is the most"):
        dl.load(tmp_path)
