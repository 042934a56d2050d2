"""Configs that describe another network than the weights, or none: one sentence each, before anything is built."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dlm_lens
from dlm_lens.testing import tiny

GOLDEN = Path(__file__).parent.parent / "golden"
Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of tiny checkpoints, each written once."""
    known: dict[Any, Path] = {}

    def directory(family: str, **config: Any) -> Path:
        key = (family, json.dumps(config, sort_keys=True))
        if key not in known:
            known[key] = tmp_path_factory.mktemp(family)
            model = tiny(family, **config)
            model.save_pretrained(known[key])
            model.tokenizer.save_pretrained(known[key])
        return known[key]

    return directory


@pytest.fixture
def hostile(tmp_path: Path, saved: Any, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """A tiny checkpoint under a changed config.json, whose weights must not be read."""
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("was read"))

    def directory(family: str, changes: dict[str, Any], **config: Any) -> Path:
        source = saved(family, **config)
        for file in source.iterdir():
            if file.name != "config.json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        values = json.loads((source / "config.json").read_text())
        # A field under two names would be decided by either.
        doubles: dict[str, list[str]] = {}
        for written, ours in WRITTEN.items():
            doubles.setdefault(ours, []).append(written)
        derived = {
            "hidden_size": ("head_dim",),
            "num_hidden_layers": ("layer_types",),
            "vocab_size": ("mask_token_id",),
        }
        for name, value in dict(changes).items():
            for other in derived.get(name, ()):
                values.pop(other, None)
            # The authors' name for it comes first, so that sentences say that one.
            values |= {other: value for other in doubles.get(name, ()) if other in values}
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        return tmp_path

    return directory


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        dlm_lens.load(path)
    said = str(caught.value)
    assert "\n" not in said
    return said


FAMILIES = ("llada", "mmada", "dream", "smdm", "sink_qwen", "sink_llama", "causal")

WRITTEN = {"d_model": "hidden_size", "n_embd": "hidden_size", "n_heads": "num_attention_heads",
           "n_head": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
           "n_query_groups": "num_key_value_heads", "n_layers": "num_hidden_layers", "n_layer": "num_hidden_layers",
           "embedding_size": "vocab_size", "padded_vocab_size": "vocab_size", "norm_eps": "rms_norm_eps",
           "mlp_hidden_size": "intermediate_size", "max_sequence_length": "max_position_embeddings",
           "block_size": "max_position_embeddings", "weight_tying": "tie_word_embeddings",
           "activation_type": "hidden_act"}  # fmt: skip
"""The authors' names, which a sentence says where a config.json does -> Llama's."""

FIELDS: list[tuple[str, Any, str]] = [
    ("num_attention_heads", 0, "num_attention_heads = 0; it must be a whole number from 1"),
    ("num_attention_heads", -4, "num_attention_heads = -4; it must be a whole number from 1"),
    ("num_key_value_heads", 0, "num_key_value_heads = 0; it must be a whole number from 1"),
    ("num_key_value_heads", 3, "num_attention_heads = 4 and num_key_value_heads = 3; the second must divide"),
    ("hidden_size", 33, "hidden_size = 33 and num_attention_heads = 4; the second must divide the first"),
    ("hidden_size", 36, "hidden_size = 36 and num_attention_heads = 4, heads of width 9; rotary positions need"),
    ("hidden_size", -32, "hidden_size = -32; it must be a whole number"),
    ("hidden_size", 32.0, "hidden_size = 32.0; it must be a whole number"),
    ("hidden_size", "32", "hidden_size = '32'; it must be a whole number"),
    ("hidden_size", True, "hidden_size = True; it must be a whole number"),
    ("hidden_size", [32], r"hidden_size = \[32\]; it must be a whole number"),
    ("hidden_size", 10**18, "hidden_size = 1000000000000000000; it must be a whole number from 1 to 2147483647"),
    ("hidden_size", 10**4000, r"hidden_size = 1000+\.\.\.; it must be a whole number"),
    ("hidden_size", 64, r"hidden_size = 64, the file's .* has 32"),
    ("num_hidden_layers", 10**18, "num_hidden_layers = 1000000000000000000; it must be a whole number"),
    ("num_hidden_layers", 900, "num_hidden_layers = 900, the files hold 2 layers: missing keys of layers 2 to 899"),
    ("num_hidden_layers", 1, "num_hidden_layers = 1, the files hold 2 layers: unexpected keys"),
    ("intermediate_size", 2**31, "intermediate_size = 2147483648; it must be a whole number"),
    ("intermediate_size", 2**31 - 1, "intermediate_size = 2147483647, the file's .* has 48"),
    ("vocab_size", 20_000_000, "vocab_size = 20000000, the file's .* has 6[45]"),
    ("max_position_embeddings", 0, "max_position_embeddings = 0; it must be a whole number"),
    ("rms_norm_eps", -1e-5, "rms_norm_eps = -1e-05; it must be a finite number from 0"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps = nan; it must be a finite number"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps = inf; it must be a finite number"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps = '1e-5'; it must be a finite number"),
    ("rope_theta", 0, "rope_theta = 0; it must be a finite number above 0"),
    ("rope_theta", float("nan"), "rope_theta = nan; it must be a finite number"),
    ("rope_scaling", 5, "rope_scaling = 5; it must be an object"),
    ("rope_parameters", {"rope_type": "nonsense", "factor": 2}, "rope_type is one of default, .*not 'nonsense'"),
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}, "whose factor is above 0, not 0"),
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": -2}, "factor is above 0, not -2"),
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}, "factor is above 0, not '4'"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 0}, "whose rope_theta is above 0, not 0"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -1e4}, "whose rope_theta is above 0"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "an object with factor for the rope_type 'yarn'"),
    ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1]},
     "lists 1 numbers as short_factor; heads of width 8 need 4"),
    ("tie_word_embeddings", "no", "tie_word_embeddings = 'no'; it must be true or false"),
    ("tie_word_embeddings", 1, "tie_word_embeddings = 1; it must be true or false"),
    ("hidden_act", "os.system", "hidden_act = 'os.system'; it must be an activation"),
    ("dtype", "load", "dtype = 'load'; it must be a dtype"),
    ("torch_dtype", "int8", "torch_dtype = 'int8'; it must be a dtype"),
    ("dtype", 7, "dtype = 7; it must be a dtype"),
    ("pad_token_id", 70, "pad_token_id = 70, which has no row in an embedding of 6[45]"),
    ("pad_token_id", -7, "pad_token_id = -7; it must be the id of a token"),
    ("eos_token_id", [2, 99], "eos_token_id = 99, which has no row"),
    ("eos_token_id", [2, "x"], "eos_token_id = .*; it must be the id of a token"),
    ("eos_token_id", 2.5, "eos_token_id = 2.5; it must be the id of a token"),
    ("bos_token_id", 10**30, "bos_token_id = 1000.*; it must be the id of a token"),
    ("quantization_config", "yes", "quantization_config = 'yes'; it must be an object"),
    ("per_layer_config", {"0": {"hidden_size": 8}}, "per_layer_config, layers of different sizes"),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_cannot_be_is_one_sentence(family: str, hostile: Checkpoint) -> None:
    import re

    for name, value, sentence in FIELDS:
        path = hostile(family, {name: value})
        try:
            said = refusal(path)
        except BaseException as error:
            raise AssertionError(f"{family}: {name} = {value!r:.80}") from error
        for written, ours in WRITTEN.items():
            said = said.replace(f" {written} = ", f" {ours} = ")
        assert re.search(sentence, said), (family, name, value, said)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llada", {"embedding_size": 20_000_000}, "embedding_size = 20000000, the file's .*ff_out.weight has 64"),
        ("llada", {"n_layers": 10**18}, "n_layers = 1000000000000000000; it must be a whole number from 1 to 1000"),
        ("llada", {"n_heads": 0}, "n_heads = 0; it must be"),
        ("llada", {"d_model": -1}, "d_model = -1; it must be"),
        ("llada", {"mlp_ratio": "4"}, "mlp_ratio = '4'; it must be"),
        ("llada", {"weight_tying": "false"}, "weight_tying = 'false'; it must be true or false"),
        ("llada", {"is_causal": True}, "is_causal = True; LLaDAConfig is for models that see the whole canvas"),
        ("llada", {"mask_token_id": 64}, "mask_token_id 64 has no row in an embedding of 64"),
        ("llada", {"mask_token_id": -1}, "mask_token_id -1 has no row"),
        ("llada", {"mask_token_id": [63]}, r"mask_token_id = \[63\]; it must be the id of a token"),
        ("llada", {"head_dim": 7}, "heads of width 7; rotary"),
        ("llada", {"head_dim": 0}, "head_dim = 0; it must be a whole number from 1 to 65536"),
        ("llada", {"head_dim": 2**20}, "head_dim = 1048576; it must be a whole number from 1 to 65536"),
        ("llada", {"head_dim": 16}, "n_kv_heads = 2 and head_dim = 16, the file's .*k_proj.weight has 16"),
        ("dream", {"layer_types": ["full_attention"]}, None),  # Dream has no windows, whatever the file says
        ("sink_qwen", {"layer_types": ["full_attention"]}, "layer_types"),
        ("sink_qwen", {"layer_types": ["nonsense", "nonsense"]}, "layer_types = .*each one of full_attention, sl"),
        ("sink_qwen", {"layer_types": 5}, "layer_types = 5; it must be a list"),
        ("sink_qwen", {"num_sinks": 10**18}, "num_sinks = 1000000000000000000; it must be a whole number from 0"),
        ("sink_qwen", {"num_sinks": 2**31 - 1}, "missing keys model.embed_tokens.sinks"),
        ("sink_qwen", {"num_sinks": -1}, "num_sinks = -1; it must be"),
        ("sink_qwen", {"num_sinks": 1.0}, "num_sinks = 1.0; it must be"),
        ("dream", {"num_sinks": 3}, "num_sinks = 3, and DreamConfig has no learned sink tokens"),
        ("causal", {"num_sinks": 1}, "num_sinks = 1, and LlamaConfig has no learned sink tokens"),
        ("sink_qwen", {"sink_placement": "middle"}, "sink tokens at 'middle': give 0 or more"),
        ("sink_qwen", {"sink_placement": 3}, "sink_placement = 3; it must be a name"),
        ("sink_qwen", {"softmax": "no_such"}, "softmax is 'no_such'; it must be one of"),
        ("sink_qwen", {"softmax": "sink_logits"}, "missing keys model.layers.0.self_attn.sink_logits"),
        ("sink_qwen", {"gated_attention": True}, "missing keys model.layers.0.self_attn.gate_proj.weight"),
        ("sink_qwen", {"gated_attention": "yes"}, "gated_attention = 'yes'; it must be true or false"),
        ("sink_qwen", {"sampler": "os.system"}, "names the sampler 'os.system'"),
        ("sink_qwen", {"sampler": ["llada"]}, "sampler = .*; it must be a name"),
        ("sink_qwen", {"sampler_defaults": [1]}, "sampler_defaults = .*; it must be an object"),
        ("smdm", {"n_layer": 10**18}, "n_layer = 1000000000000000000; it must be a whole number from 1 to 1000"),
        ("smdm", {"padded_vocab_size": 20_000_000, "mask_token_id": None}, "padded_vocab_size = 20000000, the"),
        ("smdm", {"n_query_groups": 1}, "n_query_groups = 1"),
        ("causal", {"attention_bias": True}, "missing keys model.layers.0.self_attn"),
        ("causal", {"attention_bias": "yes"}, "attention_bias = 'yes'; it must be true or false"),
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_one_family(
    family: str, changes: dict[str, Any], sentence: str | None, hostile: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hostile(family, changes)
    if sentence is None:
        monkeypatch.undo()
        assert dlm_lens.load(path).config.num_hidden_layers == 2
    else:
        import re

        said = refusal(path)
        assert re.search(sentence, said), said


@pytest.mark.parametrize("num_sinks", [1, 2, 40])
def test_sinks_that_the_file_does_not_have_are_named(num_sinks: int, hostile: Checkpoint) -> None:
    path = hostile("sink_qwen", {"num_sinks": num_sinks + 1}, num_sinks=num_sinks)
    said = refusal(path)
    assert f"num_sinks = {num_sinks + 1}, the file's model.embed_tokens.sinks has {num_sinks}" in said
    path = hostile("smdm", {"num_sinks": num_sinks + 1}, num_sinks=num_sinks)
    assert f"num_sinks = {num_sinks + 1}, the file's transformer.wte.weight has {65 + num_sinks}" in refusal(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_choose_what_transformers_reads_are_not_heeded(family: str, tmp_path: Path, saved: Any) -> None:
    source = saved(family)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((source / "config.json").read_text())
    foreign = {
        "transformers_weights": "other.safetensors", "auto_map": {"AutoConfig": "x.Y"}, "num_labels": 10**9,
        "configuration_files": ["config.4.0.0.json"], "fusion_config": {"patch_embeddings": True},
        "_attn_implementation": "kernels-community/flash-attn", "attn_implementation": "org/kernel",
        "_attn_implementation_internal": "eager", "experts_implementation": "x", "_name_or_path": "/etc",
        "output_attentions": True, "output_hidden_states": True, "return_dict": False, "gguf_file": "x.gguf",
        "is_encoder_decoder": True, "to_dict": 3, "get_text_config": "x", "base_model_tp_plan": {"a": "b"},
        "tokenizer_class": "AutoModel", "id2label": {"0": "a"}, "name_or_path": "/etc", "trust_remote_code": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values | foreign))
    model, plain = dlm_lens.load(tmp_path), dlm_lens.load(source)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert model(input_ids=ids).logits.equal(plain(input_ids=ids).logits)
    assert model.config._attn_implementation == "sdpa"
    own = ("_name_or_path", "name_or_path")
    assert {k: v for k, v in model.config.to_dict().items() if k not in own} == {
        k: v for k, v in plain.config.to_dict().items() if k not in own
    }


def test_the_config_classes_forget_them_for_the_auto_classes_too(tmp_path: Path) -> None:
    from transformers import AutoConfig

    dlm_lens.families()
    for family in ("llada", "mmada", "dream", "smdm", "sink_qwen", "sink_llama"):
        config = tiny(family).config
        config.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        values |= {"transformers_weights": "adapter_model.bin", "fusion_config": {"x": True}}
        (tmp_path / "config.json").write_text(json.dumps(values))
        read = AutoConfig.from_pretrained(tmp_path)
        assert not hasattr(read, "transformers_weights")
        assert not hasattr(read, "fusion_config")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "is nested too deeply; 32 levels are the most"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ('{"model_type": "llada", "a": ' + "[" * 40 + "]" * 40 + "}", "is nested too deeply"),
        ('{"model_type": "llada", "rms_norm_eps": NaN}', "rms_norm_eps = nan; it must be a finite number"),
        ('{"model_type": "llada", "x": [1e999]}', "x = inf; it must be a finite number"),
        ('{"n_layers": ' + "9" * 5000 + "}", "is no JSON file; fetch it again .*digits"),
        ("\xff\xfe", "is no JSON file; fetch it again"),
        ("[1]", r"holds \[1\]; it must hold an object"),
        ('{"model_type": 5}', "says model_type = 5; it must be the name of an architecture"),
        (json.dumps({"model_type": "x" * 5000}), r"no family loads model_type 'x{60,}\.\.\.;"),
        ('{"model_type": ["llada"]}', r"says model_type = \['llada'\]; it must be the name of an architecture"),
        ('{"model_type": "llada\\u001b[2J"}', r"no family loads model_type 'llada\\x1b\[2J'"),
    ],
)
def test_texts_that_are_no_config(text: str, sentence: str, tmp_path: Path) -> None:
    import re

    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    said = refusal(tmp_path)
    assert re.search(sentence, said), said[:300]
    assert len(said) < 1000


def test_a_config_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)  # no block of it is on the disk
    assert "has 1073741824 bytes; 67108864 is the most" in refusal(tmp_path)


@pytest.mark.long
def test_a_small_checkpoint_that_promises_much_is_refused_in_little_memory(tmp_path: Path) -> None:
    """`embedding_size` 20 million took 4.9 GiB; a process of 1.5 GiB more than torch's own must do."""
    values = json.loads((GOLDEN / "llada" / "config.json").read_text())
    cases = {"embedding_size": 20_000_000, "n_layers": 10**18, "d_model": 2**30, "mlp_hidden_size": 2**31 - 1}
    for name, value in cases.items():
        path = tmp_path / name
        path.mkdir()
        (path / "model.safetensors").write_bytes((GOLDEN / "llada" / "model.safetensors").read_bytes())
        (path / "config.json").write_text(json.dumps(values | {name: value, "num_labels": 10**9}))
    script = f"""
import resource, sys
import dlm_lens
dlm_lens.load({str(GOLDEN / "llada")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in {list(cases)!r}:
    try:
        dlm_lens.load({str(tmp_path)!r} + "/" + name)
    except ValueError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    *said, grown = out.stdout.splitlines()
    for (name, value), sentence in zip(cases.items(), said, strict=True):
        assert f"{name} = {value}" in sentence
    assert int(grown) < 100_000  # KiB; the golden model has 0.3 MiB
    assert resource.RLIM_INFINITY == -1


def test_tied_and_untied_weights(saved: Any, tmp_path: Path) -> None:
    """One of the two names is enough for a tied model; both, and a checkpoint of the inner model, load too."""
    source = saved("causal", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in weights
    plain = dlm_lens.load(source)
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    inner = {name.removeprefix("model."): value for name, value in weights.items()}
    for name, held in {"both": both, "inner": inner}.items():
        path = tmp_path / name
        path.mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (path / file).write_bytes((source / file).read_bytes())
        save_file(held, path / "model.safetensors", metadata={"format": "pt"})
        again = dlm_lens.load(path)
        assert all(again.state_dict()[key].equal(value) for key, value in plain.state_dict().items())
    values = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "inner" / "config.json").write_text(json.dumps(values))
    assert "missing keys lm_head.weight" in refusal(tmp_path / "inner")


def test_sharded_checkpoints_are_compared_as_a_whole(tmp_path: Path) -> None:
    tiny("llada").save_pretrained(tmp_path, max_shard_size="20KB")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"mlp_hidden_size": 50, "intermediate_size": 50}))
    assert "mlp_hidden_size = 50, the file's " in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    twice = load_file(second) | dict(list(load_file(first).items())[:1])
    save_file(twice, second, metadata={"format": "pt"})
    assert "a second time; fetch the checkpoint again" in refusal(tmp_path)


def test_integers_in_place_of_weights(hostile: Checkpoint) -> None:
    path = hostile("llada", {})
    weights = load_file(path / "model.safetensors")
    name = "model.transformer.wte.weight"
    save_file(
        weights | {name: weights[name].to(torch.int32)}, path / "model.safetensors", metadata={"format": "pt"}
    )
    assert (
        f"{name} in {path} has the dtype I32, and the config.json of {path} has no quantization_config"
        in refusal(path)
    )
