"""Parity with the original SMDM, its sink-token and its gated variant, and their checkpoints without a config."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens
from dlm_lens.adapters.families.smdm import SIZES, SMDMConfig, SMDMForMaskedLM
from dlm_lens.adapters.masked_diffusion import Float32RotaryEmbedding
from dlm_lens.attention import SinkLayout
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect
from tests.reference import forward64

PLAIN, GQA = GOLDEN / "smdm", GOLDEN / "smdm" / "variants" / "gqa"
SINK, GATE = GOLDEN / "smdm_sink", GOLDEN / "smdm_gate"
VARIANTS = [PLAIN, GQA, SINK, GATE]


def named(path: Path) -> str:
    return path.name


@pytest.mark.parametrize(("path", "case"), cases(*VARIANTS))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model = dlm_lens.load(path)
    golden = load_file(path / "forward.safetensors")
    ids = golden[f"{case}.input_ids"]
    seen = collect(model, ids)
    # The original drops the sink before the final norm, which treats every position alike.
    states = seen["hidden.final_norm"]
    seen["hidden.final_norm"] = states[:, SinkLayout.of(model).canvas(states.shape[1])]
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", "logits_bfloat16"):
            torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
            compared += 1
    assert compared == 3 + (10 if path == GATE else 8) * model.config.num_hidden_layers
    torch.testing.assert_close(model(input_ids=ids).logits, golden[f"{case}.logits"], **CLOSE)


@pytest.mark.parametrize("path", VARIANTS, ids=named)
def test_the_rotary_tables_are_the_original_s_to_the_bit(path: Path) -> None:
    golden, model = load_file(path / "forward.safetensors"), dlm_lens.load(path)
    positions = torch.arange(len(golden["rope.cos"]))[None]
    for table, name in zip(model.model.rotary_emb(torch.empty(0), positions), ("cos", "sin"), strict=True):
        assert table.dtype == torch.float32
        assert table[0].equal(golden[f"rope.{name}"].repeat(1, 2))


@torch.no_grad()
def test_the_rounding_of_the_tables_matters() -> None:
    model = dlm_lens.load(PLAIN)
    ids = load_file(PLAIN / "forward.safetensors")["plain_b1.input_ids"]
    before = model(input_ids=ids).logits
    model.model.rotary_emb = Float32RotaryEmbedding(model.config)
    # forward.json: 0.0305 in the original.
    assert (model(input_ids=ids).logits - before).abs().max().item() == pytest.approx(0.0305, abs=0.001)


@pytest.mark.parametrize("path", [PLAIN, SINK, GATE], ids=named)
@torch.no_grad()
def test_bfloat16_is_near_the_stored_run_of_the_original(path: Path) -> None:
    golden, model = load_file(path / "forward.safetensors"), dlm_lens.load(path, dtype="bfloat16")
    got = model(input_ids=golden["plain_b1.input_ids"]).logits
    assert got.dtype == torch.bfloat16
    difference = (got.float() - golden["plain_b1.logits_bfloat16"].float()).abs()
    # As in test_llada.py; no difference at all on the machine and torch that made the goldens.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02


def restated(weights: dict[str, Tensor], ids: Tensor, heads: int, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Plain SMDM under its original names, in the dtype of the weights."""
    x = weights["transformer.wte.weight"][ids]
    batch, length, width = x.shape

    def norm(x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"].float()
        return wide.to(x.dtype)

    def rotate(x: Tensor) -> Tensor:
        (cos, sin), wide = (table[:length] for table in tables), x.float()
        a, b = wide.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    layers = sum(name.endswith("norm_1.weight") for name in weights)
    for prefix in (f"transformer.h.{layer}" for layer in range(layers)):
        fused = norm(x, f"{prefix}.norm_1") @ weights[f"{prefix}.attn.attn.weight"].T
        q, k, v = fused.view(batch, length, heads, 3, -1).permute(3, 0, 2, 1, 4)
        z = torch.nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v)
        x = x + z.transpose(1, 2).reshape(batch, length, width) @ weights[f"{prefix}.attn.proj.weight"].T
        h = norm(x, f"{prefix}.norm_2")
        gate, up, down = (weights[f"{prefix}.mlp.swiglu.w{i}.weight"].T for i in (1, 2, 3))
        x = x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down
    return norm(x, "transformer.ln_f") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_restatement_in_the_same_run_gives_the_same_numbers(dtype: torch.dtype) -> None:
    golden = load_file(PLAIN / "forward.safetensors")
    weights = {name: value.to(dtype) for name, value in load_file(PLAIN / "model.safetensors").items()}
    ids = golden["plain_b2.input_ids"]
    expected = restated(weights, ids, 4, (golden["rope.cos"], golden["rope.sin"]))
    got = dlm_lens.load(PLAIN, dtype=dtype)(input_ids=ids).logits
    # One ulp of bfloat16 in a hidden state is 0.008; a norm that casts too early costs 0.16 (measured).
    torch.testing.assert_close(got, expected, atol=1e-4 if dtype == torch.float32 else 0.05, rtol=1e-4)


OPTIONS = [
    {"num_sinks": count, "sink_placement": place, "zero_sink_value": zero, "gated_attention": gated}
    for count, place, zero, gated in product((0, 1, 2), ("front", "end"), (False, True), (False, True))
    if count or (place == "front" and not zero)
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(str(value) for value in options.values()))
@torch.no_grad()
def test_every_combination_and_padding_equal_float64(options: dict[str, Any]) -> None:
    model = tiny("smdm", **options)
    ids = torch.randint(0, 65, (2, 9), generator=torch.Generator().manual_seed(3))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    for mask, implementation in product((None, padding), ("sdpa", "hooked")):
        model.set_attn_implementation(implementation)
        expected = forward64(model, ids, mask)["logits"]
        got = model(input_ids=ids, attention_mask=mask).logits.double()
        content = torch.ones_like(ids).bool() if mask is None else mask.bool()
        assert got.shape == (2, 9, 64)
        torch.testing.assert_close(got[content], expected[content], atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_the_sink_s_states_do_not_depend_on_the_canvas() -> None:
    model = dlm_lens.load(SINK)
    golden = load_file(SINK / "forward.safetensors")
    states = [
        model.model(input_ids=golden[f"{case}.input_ids"], output_hidden_states=True).hidden_states
        for case in ("plain_b1", "plain_b2")
    ]
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(one[:, 0].expand(2, -1), two[:, 0], atol=1e-6, rtol=1e-6)
    assert (states[0][-1][0, 3] - states[1][-1][0, 3]).abs().max() > 0.1


@pytest.mark.parametrize("path", VARIANTS, ids=named)
def test_what_only_the_weights_tell_is_seen(path: Path) -> None:
    config = dlm_lens.load(path).config
    rows = load_file(path / "model.safetensors")["transformer.wte.weight"].shape[0]
    assert (config.num_sinks, config.gated_attention) == (int(path == SINK), path == GATE)
    assert config.mask_token_id == config.vocab_size == rows - 1 - config.num_sinks
    assert config.max_position_embeddings == {PLAIN: 64, GQA: 32, SINK: 48, GATE: 64}[path]


@pytest.mark.parametrize("path", VARIANTS, ids=named)
def test_saving_writes_the_original_names_back(path: Path, tmp_path: Path) -> None:
    model = dlm_lens.load(path)
    model.save_pretrained(tmp_path)
    original, written = load_file(path / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    config, theirs = (
        json.loads((tmp_path / "config.json").read_text()),
        json.loads((path / "config.json").read_text()),
    )
    for name in ("n_layer", "n_head", "n_embd", "n_query_groups", "padded_vocab_size", "block_size", "norm_eps"):
        assert config[name] == theirs[name]
    again = dlm_lens.load(tmp_path)
    assert all(again.state_dict()[name].equal(value) for name, value in model.state_dict().items())
    assert again.config.num_sinks == model.config.num_sinks
    assert again.config.gated_attention == model.config.gated_attention


@pytest.mark.parametrize("options", OPTIONS[2::3], ids=str)
def test_a_model_that_was_never_loaded_is_written_in_the_original_format(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny("smdm", **options)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written["transformer.wte.weight"].shape == (65 + options["num_sinks"], 32)
    assert written["transformer.h.1.attn.attn.weight"].shape == ((4 + 2 * 2) * 8, 32)
    k = written["transformer.h.1.attn.attn.weight"].view(2, 4, 8, 32)[1, 2]
    assert k.equal(model.model.layers[1].self_attn.k_proj.weight[8:16])
    again = dlm_lens.load(tmp_path)
    assert all(again.state_dict()[name].equal(value) for name, value in model.state_dict().items())


def test_shards_hold_the_original_names_too(tmp_path: Path) -> None:
    model = dlm_lens.load(SINK)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(SINK / "model.safetensors").keys()
    assert len(set(index.values())) > 3
    for options in ({}, {"device_map": "auto"}):
        again = dlm_lens.load(tmp_path, **options).state_dict()
        assert all(again[name].equal(value) for name, value in model.state_dict().items())


def bare(directory: Path, name: str = "mdm-tiny.safetensors", path: Path = SINK, **changes: Tensor) -> Path:
    """The weights as the authors' scripts write them: no metadata, no config."""
    directory.mkdir(exist_ok=True)
    save_file({**load_file(path / "model.safetensors"), **changes}, directory / name)
    return directory / name


@pytest.mark.long
def test_weights_alone_are_described_by_a_size_or_a_json_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_file(SINK / "forward.safetensors")
    file, described = bare(tmp_path / "a"), (SINK / "config.json").read_text()
    monkeypatch.setitem(SIZES, "tiny", json.loads(described))  # type: ignore[arg-type]
    models = [dlm_lens.load(file, size="tiny"), dlm_lens.load(file.parent, size="tiny")]
    file.with_suffix(".json").write_text(described)
    models += [dlm_lens.load(file), dlm_lens.load(str(file.parent))]
    beside = bare(tmp_path / "b", "another.safetensors")
    (beside.parent / "config.json").write_text(described)
    models.append(dlm_lens.load(beside, dtype="float32", device_map="cpu"))
    for model in models:
        assert not model.training
        assert model.tokenizer is None
        with torch.no_grad():
            got = model(input_ids=expected["plain_b2.input_ids"]).logits
        torch.testing.assert_close(got, expected["plain_b2.logits"], **CLOSE)
    tiny("smdm").tokenizer.save_pretrained(file.parent)
    assert dlm_lens.load(file).tokenizer("w3 w4")["input_ids"] == [3, 4]


def test_one_file_of_a_hub_repository_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = bare(tmp_path), []
    monkeypatch.setitem(SIZES, "tiny", json.loads((SINK / "config.json").read_text()))  # type: ignore[arg-type]

    def download(repository: str, name: str, **options: Any) -> str | None:
        if not name.endswith(".safetensors"):
            return None  # there is no tokenizer
        asked.append((repository, name, options.get("revision")))
        return str(file)

    monkeypatch.setattr("dlm_lens.adapters.hub.cached_file", download)
    name = "nieshen/SMDM/mdm_safetensors/mdm-tiny.safetensors"
    assert dlm_lens.load(name, size="tiny", revision="v1").config.num_sinks == 1
    assert asked == [("nieshen/SMDM", "mdm_safetensors/mdm-tiny.safetensors", "v1")]


def test_a_file_that_neither_disk_nor_hub_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"on the hub 'nobody/nothing' has no weights/x.safetensors in"):
        dlm_lens.load("nobody/nothing/weights/x.safetensors", size="472M")


@pytest.mark.parametrize("size", sorted(SIZES))
def test_released_sizes_have_the_parameters_that_they_are_named_after(size: str) -> None:
    config = SMDMConfig(**SIZES[size])
    with torch.device("meta"):
        model = SMDMForMaskedLM(config)
    counted = sum(
        p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name
    )
    assert f"{counted / 1e6:.0f}M" == size
    assert model.model.embed_tokens.weight.shape == (32001, config.hidden_size)
    assert model.lm_head.weight.shape == (32000, config.hidden_size)
    assert (config.mask_token_id, config.max_position_embeddings, config.head_dim) == (32000, 2048, 128)


def test_weights_that_say_too_little_or_otherwise_are_refused(tmp_path: Path) -> None:
    file = bare(tmp_path / "a")
    with pytest.raises(ValueError, match=r"does not give the dimensions of its model; pass size= \(472M, 1028M\)"):
        dlm_lens.load(file)
    with pytest.raises(ValueError, match=r"size '7B' is none of smdm's: 472M, 1028M"):
        dlm_lens.load(file, size="7B")
    with pytest.raises(
        ValueError, match=r"another model than the weights: n_layer 18 \(the weights: 3\), n_embd 1280"
    ):
        dlm_lens.load(file, size="472M")
    with pytest.raises(ValueError, match=r"size is for weights without a config; .*llada has one"):
        dlm_lens.load(GOLDEN / "llada", size="472M")
    save_file(load_file(file), file.parent / "more.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 weight files .* give the path of one, such as .*mdm-tiny"):
        dlm_lens.load(file.parent)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{n_layer: 3}", "mdm-tiny.json is no JSON file"), ("[3]", r"mdm-tiny.json holds \[3\]; it must")],
)
def test_a_description_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = bare(tmp_path)
    file.with_suffix(".json").write_text(text)
    with pytest.raises(ValueError, match=message):
        dlm_lens.load(file)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = json.loads((SINK / "config.json").read_text())

    def described(name: str, **changes: Tensor) -> Path:
        file = bare(tmp_path / name, **changes)
        file.with_suffix(".json").write_text(json.dumps(config))
        return file

    rows = torch.zeros(140, 64)
    with pytest.raises(ValueError, match=r"wte.weight has 140 rows for a vocabulary of 128; an SMDM has 1 more"):
        dlm_lens.load(described("rows", **{"transformer.wte.weight": rows}))
    fused = torch.zeros(128, 64)
    with pytest.raises(ValueError, match=r"rows of the fused projection 192 \(the weights: 128\)"):
        dlm_lens.load(described("fused", **{"transformer.h.0.attn.attn.weight": fused}))
    with pytest.raises(ValueError, match=r"unexpected keys .*surplus"):
        dlm_lens.load(described("surplus", surplus=torch.ones(1)))
    (tmp_path / "other").mkdir()
    save_file({"encoder.weight": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"its tensors \(encoder.weight, ...\) are not those of a family .*\(sedd, smdm\)"
    ):
        dlm_lens.load(tmp_path / "other")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing like it")
    with pytest.raises(ValueError, match=r"broken.safetensors is no readable safetensors file"):
        dlm_lens.load(tmp_path / "broken.safetensors")
    (tmp_path / "weights.pth").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"weights.pth is no safetensors file; pickled weights are refused"):
        dlm_lens.load(tmp_path / "weights.pth", size="472M")
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"names no model_type, and there are no safetensors weights"):
        dlm_lens.load(tmp_path / "silent")


def test_the_mask_is_the_row_behind_the_vocabulary() -> None:
    with pytest.raises(
        ValueError, match=r"mask_token_id is 5; an SMDM's mask is the row after its vocabulary, 192"
    ):
        dlm_lens.load(PLAIN, mask_token_id=5)
    assert dlm_lens.load(PLAIN, mask_token_id=192).config.mask_token_id == 192
    assert "smdm" in {family.name: family for family in dlm_lens.families()}


@pytest.mark.parametrize(("option", "value"), [("bias", True), ("_mlp_class", "GptNeoxMLP"), ("condense_ratio", 2)])
def test_an_architecture_that_is_not_implemented_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}; only"):
        SMDMConfig(**{option: value})


@pytest.mark.parametrize("options", [{"num_sinks": -1}, {"num_sinks": 1, "sink_placement": "middle"}], ids=str)
def test_a_layout_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sink tokens at '(front|middle)': give 0 or more"):
        SMDMConfig(**options)


def test_lit_gpt_s_fields_map_to_llama() -> None:
    config = SMDMConfig(
        n_embd=64, n_head=4, n_query_groups=None, n_layer=3, intermediate_size=96, vocab_size=190, norm_eps=1e-4,
        padding_multiple=64, padded_vocab_size=None, block_size=77, org="Lightning-AI", name="Diff_LLaMA_tiny",
    )  # fmt: skip
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 4)
    assert (config.vocab_size, config.embedding_rows, config.mask_token_id) == (192, 193, 192)
    assert (config.num_hidden_layers, config.intermediate_size, config.max_position_embeddings) == (3, 96, 77)
    assert (config.head_dim, config.rms_norm_eps) == (16, 1e-4)
    assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("settings", [{}, {"num_sinks": 1}], ids=["plain", "sink"])
@torch.no_grad()
def test_a_tied_head_round_trips(settings: dict[str, Any], tmp_path: Path) -> None:
    model: Any = tiny("smdm", tie_word_embeddings=True, **settings)
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded: Any = dlm_lens.load(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_without_its_embedding_a_tied_head_is_missing_too(tmp_path: Path) -> None:
    model: Any = tiny("smdm", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.wte.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys lm_head\.weight, model\.embed_tokens\.weight"):
        dlm_lens.load(tmp_path)
