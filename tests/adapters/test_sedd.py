"""Parity with the original SEDD: every intermediate, its scores, and checkpoints in its format."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.families.sedd import SEDDConfig, log_scores
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN, cases, compare_dit_with_the_original
from tests.adapters.test_hub import load_all
from tests.dit64 import dit64

SEDD = GOLDEN / "sedd"


@pytest.mark.parametrize(("path", "case"), cases(SEDD))
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    def scores(logits: Tensor, ids: Tensor, sigma: Tensor) -> Tensor:
        return log_scores(logits, ids, sigma[:, None])

    compare_dit_with_the_original(path, case, log_scores=scores)


def test_scores_are_the_ratios_of_a_float64_network() -> None:
    """At a mask p(x0) / (exp(sigma) - 1), up to the sum of q, and 1 for the token that the canvas holds."""
    model = tiny("sedd")
    ids, sigma = torch.tensor([[1, 63, 5, 63, 63]]), 0.8
    with torch.no_grad():
        found = log_scores(model(input_ids=ids, sigma=torch.tensor([sigma])).logits, ids, torch.tensor([[sigma]]))
    q = dit64(model, ids, sigma=sigma)["logits"].exp()[..., :63] / 63
    expected = q / (math.exp(sigma) - 1)
    masked = ids == 63
    torch.testing.assert_close(found.double().exp()[masked][:, :63], expected[masked], atol=1e-6, rtol=1e-4)
    assert found.exp()[0].gather(-1, ids[0, :, None]).unique().tolist() == [1.0]
    total = q.sum(-1)
    assert float((total - 1).abs()[masked].min()) > 0.1  # a random network's ratios have no sum of 1


@torch.no_grad()
def test_the_noise_level_changes_the_logits_and_is_taken_from_the_masks() -> None:
    model: Any = tiny("sedd")
    ids = torch.tensor([[1, 2, 63, 63, 5, 63], [61, 61, 7, 63, 8, 9]])
    content = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    share = torch.tensor([3 / 6, 1 / 4]) * 0.999
    expected = model(input_ids=ids, attention_mask=content, sigma=-torch.log(1 - share)).logits
    torch.testing.assert_close(model(input_ids=ids, attention_mask=content).logits, expected)
    other = model(input_ids=ids, attention_mask=content, sigma=1 - torch.log(1 - share)).logits
    assert (other - expected).abs().amax((1, 2)).min() > 0.05


def test_saving_writes_the_originals_names_and_fields(tmp_path: Path) -> None:
    model: Any = dl.load(SEDD)
    assert model.config.mask_token_id == 40
    assert model.sampler_defaults["predictor"] == "analytic"
    check_hook_points(model)
    model.save_pretrained(tmp_path)
    original, written = load_file(SEDD / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() - written.keys() == {"rotary_emb.inv_freq"}  # a buffer, computed here
    assert all(original[name].equal(written[name]) for name in written)
    given, values = (json.loads((place / "config.json").read_text()) for place in (SEDD, tmp_path))
    assert {name: values.get(name) for name in ("tokens", "graph", "noise", "training", "eval")} == {
        name: given[name] for name in ("tokens", "graph", "noise", "training", "eval")
    }
    assert given["model"].items() - {("name", "small")} <= values["model"].items()
    again: Any = dl.load(tmp_path)
    ids = torch.tensor([[3, 40, 7, 40]])
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)


def test_released_files_have_no_model_type_and_are_known_by_their_tensors(tmp_path: Path) -> None:
    assert "model_type" not in json.loads((SEDD / "config.json").read_text())
    shutil.copy(SEDD / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"pass size= \(small, medium\)"):
        dl.load(tmp_path)
    with pytest.raises(ValueError, match="n_blocks = 12, the files hold 2 layers"):
        dl.load(tmp_path, size="small")
    (family,) = [family for family in dl.families() if family.name == "sedd"]
    released = {
        size: SEDDConfig(**family.weights_only.sizes[size])  # type: ignore[union-attr]
        for size in ("small", "medium")
    }
    shapes = {
        size: (one.hidden_size, one.num_hidden_layers, one.num_attention_heads, one.cond_dim)
        for size, one in released.items()
    }
    assert shapes == {"small": (768, 12, 12, 128), "medium": (1024, 24, 16, 128)}
    assert {(one.vocab_size, one.mask_token_id, one.max_position_embeddings) for one in released.values()} == {
        (50258, 50257, 1024)
    }
    assert family.special_ids[50258] == {"mask": 50257, "bos": 50256, "eos": 50256}
    assert family.tokenizers[50258] == ("openai-community/gpt2", "gpt2")


@pytest.mark.long
def test_files_in_the_hubs_cache_load_by_the_released_name(tmp_path: Path) -> None:
    repository = tmp_path / "models--louaaron--sedd-small"
    directory = repository / "snapshots" / ("a" * 40)
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SEDD / name, directory)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    results, _ = load_all(
        tmp_path,
        {"path_or_hub_name": "louaaron/sedd-small"},
        {"path_or_hub_name": "louaaron/sedd-small", "family": "sedd", "dtype": "bfloat16"},
        {"path_or_hub_name": "louaaron/sedd-small", "family": "mdlm"},
    )
    assert results[:2] == [[2, False]] * 2
    assert results[2] == [
        "ValueError",
        "the config.json of louaaron/sedd-small says model_type 'sedd', and mdlm has mdlm: leave family out, or "
        "name that of the checkpoint",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"graph": {"type": "uniform"}}, "graph.type='uniform'; only 'absorb', as in the released models"),
        ({"noise": {"type": "geometric"}}, "noise.type='geometric'; only 'loglinear'"),
        ({"model": {"scale_by_sigma": False}}, "model.scale_by_sigma=False; only True"),
        ({"graph": "absorb"}, "graph='absorb'; it must be an object with settings"),
        ({"model": {"n_blocks": 0}}, "n_blocks = 0; it must be a whole number"),
        ({"model": {"hidden_size": 33}}, "hidden_size = 33 and n_heads = 4; the second must divide"),
        ({"tokens": "x"}, "tokens"),
        ({"tokens": 41}, r"\[41, 32\] in the file, \[42, 32\] in the model"),
        ({"model": {"n_blocks": 3}}, "n_blocks = 3, the files hold 2 layers"),
    ],
)
def test_configs_that_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = json.loads((SEDD / "config.json").read_text())
    for name, value in changed.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    shutil.copy(SEDD / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        dl.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mask_token_id": 3}, r"mask_token_id=3; its \[MASK\] is the last of 64 rows"),
        ({"time_conditioning": False}, "time_conditioning or adaln off"),
        ({"adaln": False}, "time_conditioning or adaln off"),
    ],
)
def test_networks_that_sedd_has_not(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("sedd", **config)


def test_every_field_of_the_network_reaches_it() -> None:
    model = {"hidden_size": 8, "cond_dim": 12, "length": 20, "n_blocks": 3, "n_heads": 2, "dropout": 0.3}
    config = SEDDConfig(model=model, tokens=9)
    assert (config.hidden_size, config.cond_dim, config.max_position_embeddings) == (8, 12, 20)
    assert (config.num_hidden_layers, config.num_attention_heads, config.dropout) == (3, 2, 0.3)
    assert (config.vocab_size, config.mask_token_id, config.intermediate_size) == (10, 9, 32)
    assert SEDDConfig(**json.loads(config.to_json_string(use_diff=False))).to_dict() == config.to_dict()


@torch.no_grad()
def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    golden = load_file(SEDD / "forward.safetensors")
    ids, sigma = golden["two_levels.input_ids"], golden["two_levels.sigma"]
    logits = dl.load(SEDD, dtype="bfloat16")(input_ids=ids, sigma=sigma).logits
    difference = (logits.float() - golden["two_levels.logits"]).abs()
    # Logits of up to 4.2 have an ulp of 2^-5 in bfloat16; rounding in two layers adds up to a few of them.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.03


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    shutil.copy(SEDD / "config.json", tmp_path)
    torch.save(load_file(SEDD / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors weights"):
        dl.load(tmp_path)


def test_tensors_of_another_model_are_no_sedd(tmp_path: Path) -> None:
    shutil.copy(SEDD / "config.json", tmp_path)
    tensors = load_file(SEDD / "model.safetensors")
    tensors.pop("sigma_map.mlp.0.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not those of a family that is read without one"):
        dl.load(tmp_path)
