"""Parity with the original GIDD (2512.10858), and what its layers have that no other family's have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.attention import adding_module, check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, check_saved_names, collect

UNIFORM, MASKED = GOLDEN / "gidd", GOLDEN / "gidd_mask"


@pytest.mark.parametrize(("path", "case"), cases(UNIFORM, MASKED))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model: Any = dl.load(path)
    stored = {
        key.removeprefix(f"{case}."): value
        for key, value in load_file(path / "forward.safetensors").items()
        if key.startswith(f"{case}.")
    }
    ids, inputs = stored.pop("input_ids"), {}
    length = ids.shape[1]
    start = next(one for one in json.loads((path / "forward.json").read_text())["cases"] if one["name"] == case)
    if (first := start.get("noise_from")) is not None:  # clean positions see no noisy one
        noisy = torch.arange(length) >= first
        inputs["attention_mask"] = (noisy[:, None] >= noisy).expand(2, 1, -1, -1)
    seen = collect(model, ids, **inputs)
    for key, expected in stored.items():
        got = seen[key]
        # The original has no queries for the learned key, and no residual stream.
        axis = -2 if key[0] in "qp" and key[:2] != "hi" else 1
        got = got.narrow(axis, 0, length) if key[0] not in "kv" else got
        torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    assert len(stored) == 3 + 8 * model.config.num_hidden_layers
    assert seen["probs0"].shape[-1] == length + model.config.num_sinks


@pytest.mark.parametrize("path", [UNIFORM, MASKED], ids=lambda path: path.name)
@torch.no_grad()
def test_a_saved_checkpoint_has_the_original_names(path: Path, tmp_path: Path) -> None:
    again = check_saved_names(path, tmp_path)
    ids = torch.arange(4, 14)[None]
    assert again(input_ids=ids).logits.equal(dl.load(path)(input_ids=ids).logits)
    values = json.loads((tmp_path / "config.json").read_text())
    original = json.loads((path / "config.json").read_text())
    missing = {name for name in original if values.get(name) != original[name]} - {"rope_scaling"}
    assert not missing


@torch.no_grad()
def test_what_the_layers_add_are_the_scaled_outputs() -> None:
    model: Any = tiny("gidd")
    check_hook_points(model)
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[1]
    for site in ("attn_out", "mlp_out", "resid"):
        adding_module(layer, site).register_forward_hook(
            lambda _m, args, out, site=site: seen.update({site: out, f"{site} before": args[0]})
        )
    layer.self_attn.o_proj.register_forward_hook(lambda _m, _a, out: seen.__setitem__("attention", out))
    model(input_ids=torch.arange(4, 14)[None])
    torch.testing.assert_close(seen["attn_out"], seen["attention"] * 4 / 2)  # resid_scale over layers
    torch.testing.assert_close(seen["resid before"] + seen["attn_out"] + seen["mlp_out"], seen["resid"])


@torch.no_grad()
def test_the_learned_key_and_value_are_those_of_the_sink_token_in_every_pass() -> None:
    model: Any = tiny("gidd")
    seen: dict[str, torch.Tensor] = {}
    attention = model.model.layers[1].self_attn
    for point in ("k", "rot_k", "v"):
        getattr(attention, f"hook_{point}").register_forward_hook(
            lambda _m, _a, out, point=point: seen.__setitem__(point, out)
        )
    model(
        input_ids=torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]),
        attention_mask=torch.tensor([[1] * 4, [0, 1, 1, 1]]),
    )
    for point, learned in (
        ("k", attention.k_norm.k_bias),
        ("rot_k", attention.k_norm.k_bias),
        ("v", attention.v_bias),
    ):
        assert seen[point].shape[1] == 5
        for row in seen[point]:
            assert row[4].equal(learned.detach()), point  # position 0 is not rotated
    assert not seen["v"][0, 0].equal(seen["v"][1, 0])
    hide = dl.compare(model, [5, 6], hooks=[dl.hooks.mask_positions(dl.hooks.sink(0))], gen_length=4)
    assert not hide.hooked.confidence.equal(hide.plain.confidence)


@torch.no_grad()
def test_padding_and_tied_embeddings() -> None:
    model: Any = tiny("gidd", tie_word_embeddings=True)
    ids = torch.tensor([[7, 8, 9]])
    alone = model(input_ids=ids).logits
    # Tied logits are not scaled.
    torch.testing.assert_close(alone, model.model(input_ids=ids).last_hidden_state[:, :3] @ model.lm_head.weight.T)
    padded = model(
        input_ids=torch.tensor([[61, 61, 7, 8, 9]]), attention_mask=torch.tensor([[0, 0, 1, 1, 1]])
    ).logits
    torch.testing.assert_close(padded[:, 2:], alone, atol=1e-5, rtol=1e-5)
    assert tiny("gidd").config.logit_scale == 4.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_qk_norm": False}, "use_qk_norm=False"),
        ({"is_causal": True}, "is_causal=True"),
        ({"weight_scaling": "fan_in"}, "weight_scaling='fan_in'"),
        ({"weight_scaling": None}, 'has no weight_scaling, for which the authors\' code takes "fan_in"'),
        ({"head_dim": 6}, "4 heads of width 6 and hidden_size 32"),
        ({"min_log_snr": 9.0}, "min_log_snr 9.0 and max_log_snr 9.0; the first must be the less"),
    ],
)
def test_layers_of_another_kind_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    for name in ("model.safetensors",):
        (tmp_path / name).write_bytes((UNIFORM / name).read_bytes())
    values = json.loads((UNIFORM / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(ValueError, match=words):
        dl.load(tmp_path)


def test_which_noise_a_checkpoint_has_is_in_its_config() -> None:
    uniform, masked = dl.load(UNIFORM), dl.load(MASKED)
    assert (uniform.config.mask_token_id, masked.config.mask_token_id) == (None, 3)
    assert uniform.sampler_defaults["noise_type"] == 1000.0
    assert masked.sampler_defaults["noise_type"] == -1000.0
    first = [
        dl.denoise(model, [[5, 6]], gen_length=4, canvas_length=6).canvases[0, 0, 2:] for model in (uniform, masked)
    ]
    assert first[1].tolist() == [3] * 6
    assert 3 not in first[0].tolist()
    assert len(set(first[0].tolist())) > 2
