"""LoRA adapters of PEFT merged on loading: against merged files, PEFT's own merge, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.adapters import loading
from dlm_lens.cli import app as cli
from dlm_lens.testing import tiny

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "fan_in_fan_out": False}
LEFT_OUT = (
    "embed",
    "wte",
    "norm",
    "ln_",
    "experts.",
    ".gate.weight",
    "rotary",
    "router",
    "sigma",
    "adaLN",
    "lm_head",
)
"""Parts of names of tensors that are no weight of a linear module here, or are joined while loading."""

# (checkpoint in the authors' names, whether its weights are [in, out])
CHECKPOINTS = {
    "llada": False,
    "mmada": False,
    "dream": False,
    "smdm": False,
    "llada2": False,
    "sdar": False,
    "mdlm": False,
    "gidd_dit": False,
    "diffugpt": True,
    "stable_diffcoder": False,
    "sumi": False,
}
MASK = {"llada2": 155, "diffugpt": 1, "stable_diffcoder": 1}
"""Of checkpoints whose config.json names none."""


def load(path: Path, family: str, **given: Any) -> Any:
    return dl.load(path, mask_token_id=MASK.get(family), check=False, **given)


def write_adapter(
    path: Path, factors: Mapping[str, tuple[Tensor, Tensor]], prefix: str = "base_model.model.", **config: Any
) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    tensors = {}
    for name, (a, b) in factors.items():
        tensors |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def factors_of(shape: torch.Size, seed: int, transposed: bool = False, rank: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out, into = reversed(shape) if transposed else shape
    return torch.randn(rank, into, generator=generator) * 0.3, torch.randn(out, rank, generator=generator) * 0.3


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_merged_adapter_is_a_checkpoint_with_merged_weights(family: str, tmp_path: Path) -> None:
    """Under the authors' names: W + (alpha / r) B A in float64 in the file, loaded, against the adapter."""
    transposed, source = CHECKPOINTS[family], GOLDEN / family
    held = load_file(source / "model.safetensors")
    weights = [
        name
        for name, value in held.items()
        if value.ndim == 2 and name.endswith(".weight") and not any(part in name for part in LEFT_OUT)
    ]
    assert len(weights) >= 6
    factors = {
        name.removesuffix(".weight"): factors_of(held[name].shape, seed, transposed)
        for seed, name in enumerate(sorted(weights))
    }
    merged = dict(held)
    for name, (a, b) in factors.items():
        product = 2.0 * b.double() @ a.double()
        whole = held[f"{name}.weight"].double() + (product.T if transposed else product)
        merged[f"{name}.weight"] = whole.to(held[f"{name}.weight"].dtype).contiguous()
    copytree(source, tmp_path / "merged", ignore=lambda *_: ["variants"])
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    adapter = write_adapter(tmp_path / "adapter", factors, fan_in_fan_out=transposed)
    wanted, found = load(tmp_path / "merged", family), load(source, family, adapter=adapter)
    plain, changed = load(source, family).state_dict(), 0
    for name, value in wanted.state_dict().items():
        # Of sums in float32 against float64.
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-6)
        changed += not value.equal(plain[name])
    assert changed >= len(weights)


def test_the_merge_is_that_of_peft() -> None:
    """tests/golden/lora: PEFT 0.21.2's adapter of the stored Dream, ranks and scales by module, and its merge."""
    golden = load_file(GOLDEN / "lora" / "merged.safetensors")
    model: Any = dl.load(GOLDEN / "dream", adapter=GOLDEN / "lora", check=False)
    plain: Any = dl.load(GOLDEN / "dream", check=False)
    state, before = model.state_dict(), plain.state_dict()
    assert {name for name, value in state.items() if not value.equal(before[name])} == set(golden)
    for name, value in golden.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 6 / 3**0.5),
        ({"alpha_pattern": {"q_proj": 12}}, 4.0),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "q_proj": 9}}, 1.0),
        ({"r": 8, "rank_pattern": {"layers.0.self_attn.q_proj": 3}}, 2.0),
        ({"init_lora_weights": "gaussian"}, 2.0),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales(config: dict[str, Any], scale: float, dtype: str, tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    plain: Any = dl.load(tmp_path / "model", dtype=dtype)
    name = "model.layers.0.self_attn.q_proj"
    before = plain.state_dict()[f"{name}.weight"]
    a, b = factors_of(before.shape, 0)
    adapter = write_adapter(tmp_path / "adapter", {name: (a, b)}, **config)
    model: Any = dl.load(tmp_path / "model", dtype=dtype, adapter=adapter)
    wanted = before.double() + scale * (b.double() @ a.double())
    found = model.state_dict()[f"{name}.weight"]
    assert found.dtype == before.dtype
    # Rounded once: in bfloat16 half of a step of 2^-8.
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-6)


def test_tensors_that_are_held_whole_replace_weights(tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    plain: Any = dl.load(tmp_path / "model")
    head = torch.randn(plain.lm_head.weight.shape)
    adapter = write_adapter(tmp_path / "adapter", {}, modules_to_save=["lm_head"])
    save_file({"base_model.model.lm_head.weight": head}, adapter / "adapter_model.safetensors")
    model: Any = dl.load(tmp_path / "model", adapter=adapter)
    assert model.lm_head.weight.equal(head)
    save_file({"base_model.model.lm_head.weight": head[:-1].clone()}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"changes lm_head.weight by a tensor of \[63, 32\], and the model's has \[64, 3"
    ):
        dl.load(tmp_path / "model", adapter=adapter)


def test_tied_weights_are_refused(tmp_path: Path) -> None:
    tiny("sdar", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    plain: Any = dl.load(tmp_path / "model")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    adapter = write_adapter(tmp_path / "adapter", {"lm_head": factors_of(plain.lm_head.weight.shape, 0)})
    with pytest.raises(
        ValueError, match=r"changes lm_head.weight, which is model.embed_tokens.weight too in this model"
    ):
        dl.load(tmp_path / "model", adapter=adapter)


def test_a_command_line_takes_an_adapter(tmp_path: Path) -> None:
    model = tiny("dream")
    model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    name = "model.layers.1.mlp.down_proj"
    factors = factors_of(model.state_dict()[f"{name}.weight"].shape, 1)
    adapter = write_adapter(tmp_path / "adapter", {name: (factors[0] * 40, factors[1] * 40)})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2 w3"}\n')
    command = ["record", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.jsonl"), "--gen-length", "6"]
    found = {}
    for out, more in (("plain", []), ("adapted", ["--load", f"adapter={adapter}"])):
        result = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / out), *more])
        assert result.exit_code == 0, result.output
        found[out] = dl.Recording.load(tmp_path / out).run.tokens
    assert not found["plain"].equal(found["adapted"])
    adapted: Any = dl.load(tmp_path / "model", adapter=adapter)
    assert dl.denoise(adapted, "w1 w2 w3", gen_length=6).tokens.equal(found["adapted"])
    mixed = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "adapted")])
    assert mixed.exit_code == 1
    assert "model name" in str(mixed.exception)
    (held,) = (tmp_path / "adapted").glob("rows-*")
    lens = ["lens", str(held), "--positions", "3"]
    base = CliRunner().invoke(cli.app, lens)
    assert "model with the adapter adapter: give --load adapter=" in str(base.exception)
    assert CliRunner().invoke(cli.app, [*lens, "--load", f"adapter={adapter}"]).exit_code == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'; only LORA is read here"),
        ({"use_dora": True}, r"use_dora = True: its matrices have magnitudes of their own \(DoRA\)"),
        ({"bias": "all"}, "bias = 'all': it trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': training changed the base weights too"),
        ({"r": 0}, "r = 0 and lora_alpha = 6; both are positive numbers"),
        ({"r": True}, "r = True and lora_alpha = 6"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x'; both are"),
        ({"r": 5}, "says rank 5 for model.layers.0.self_attn.q_proj, and its factors have 3"),
        ({"rank_pattern": {"(a+)+$": 3}}, r"rank_pattern = .* maps names of modules to positive numbers"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern = .* positive numbers"),
        ({"alpha_pattern": [1]}, "alpha_pattern = "),
        ({"target_parameters": ["x"]}, "it changes parameters that are no module's weight"),
        ({"lora_alpha": 10**400}, "r = 3 and lora_alpha = 10000.*; both are positive numbers"),
        ({"rank_pattern": {"q_proj": 3.5}}, r"rank_pattern = .* \(ranks are whole\)"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern = .* positive numbers"),
        (
            {"lora_alpha": 1e300},
            r"adds to model.layers.0.self_attn.q_proj holds NaN or infinity: the adapter is dam",
        ),
    ],
)
def test_configs_that_say_another_arithmetic_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj"
    factors = {name: factors_of(tiny("dream").state_dict()[f"{name}.weight"].shape, 0)}
    adapter = write_adapter(tmp_path / "adapter", factors, **config)
    with pytest.raises(ValueError, match=message) as error:
        dl.load(tmp_path / "model", adapter=adapter)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.0.self_attn.q_proj.lora_A.weight"], "holds one factor of model.layers.0.self_attn.q_proj"),
        (["model.layers.9.self_attn.q_proj.lora_A.weight", "model.layers.9.self_attn.q_proj.lora_B.weight"],
         "changes model.layers.9.self_attn.q_proj.weight, which this model does not have; is it an adapter of"),
        (["model.embed_tokens.lora_embedding_A"], "holds .*lora_embedding_A, which is no factor of a weight"),
        (["model.layers.0.self_attn.q_proj.lora_magnitude_vector"], "lora_magnitude_vector, which is no factor"),
        ([], "holds no factors of LoRA"),
    ],
)  # fmt: skip
def test_files_that_are_no_adapter_of_the_model_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", {})
    tensors = {
        f"base_model.model.{name}": torch.zeros(3, 32).mT[:, :3].contiguous()
        if "_B" in name
        else torch.zeros(3, 32)
        for name in names
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        dl.load(tmp_path / "model", adapter=adapter)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        # Their product would have 160 GB, of a file of 1.6 MB.
        (torch.ones(1, 200_000), torch.ones(200_000, 1), r"q_proj.weight by a tensor of \[200000, 200000\]"),
        (torch.ones(1, 32), torch.ones(31, 1), r"by a tensor of \[31, 32\], and the model's has \[32, 32\]"),
        (torch.ones(1, 32), torch.ones(32, 2), r"have the shapes \[1, 32\] and \[32, 2\]; they are \[r, in\]"),
        (torch.ones(()), torch.ones(32, 1), r"have the shapes \[\] and \[32, 1\]; they are \[r, in\]"),
        (torch.ones(1, 32, dtype=torch.complex64), torch.ones(32, 1), "lora_A.weight in .* has the dtype C64; an"),
        (torch.ones(1, 32), torch.ones(32, 1, dtype=torch.int64), "lora_B.weight in .* has the dtype I64; an"),
    ],
)  # fmt: skip
def test_factors_that_do_not_fit_are_refused_before_weights_are_read(
    a: Tensor, b: Tensor, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (a, b)}, r=1)
    monkeypatch.setattr(loading, "load_weights", None)
    with pytest.raises(ValueError, match=message) as error:
        dl.load(tmp_path / "model", adapter=adapter)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("adapter", [-1, True, "", " ", ["x"]])
def test_names_that_are_none_are_refused_before_weights_are_read(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("dream").save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_weights", None)
    with pytest.raises(ValueError, match=r"adapter is .*; give the directory or the hub name of a LoRA adapter"):
        dl.load(tmp_path, adapter=adapter)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    tiny("dream").save_pretrained(tmp_path / "model")
    with pytest.raises(
        FileNotFoundError, match=r"nobody/nothing/adapter_config.json is no file here, and on the hub"
    ):
        dl.load(tmp_path / "model", adapter="nobody/nothing")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the adapter .*adapter has no adapter_config.json"):
        dl.load(tmp_path / "model", adapter=tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FileNotFoundError, match=r"no adapter_model.safetensors; pickled weights are refused"):
        dl.load(tmp_path / "model", adapter=tmp_path / "adapter")
    shape = tiny("llada2").state_dict()["model.layers.1.mlp.experts.down_proj"].shape[1:]
    tiny("llada2").save_pretrained(tmp_path / "experts")
    adapter = write_adapter(
        tmp_path / "of_experts", {"model.layers.1.mlp.experts.0.down_proj": factors_of(shape, 0)}
    )
    with pytest.raises(
        ValueError, match=r"experts\.0\.down_proj\.weight, which is joined with others while loading"
    ):
        dl.load(tmp_path / "experts", adapter=adapter)


def test_a_directory_of_an_adapter_is_told_as_such(tmp_path: Path) -> None:
    """A checkpoint of a training of an adapter also holds the optimiser's moments, and no config.json."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"holds adapter_config\.json, an adapter of PEFT: give its base"):
        dl.load(tmp_path)
