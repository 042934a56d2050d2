"""Parity with the original LLaDA-MoE, and how its checkpoints are recognised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect
from tests.reference import forward64
from tests.sampling.plain_dllm import plain_dllm

MOE = GOLDEN / "llada_moe"
IDS = {name: json.loads((MOE / "forward.json").read_text())[name] for name in ("mask_token_id", "eos_token_id")}


@pytest.mark.parametrize(("path", "case"), cases(MOE))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str) -> None:
    model: Any = dlm_lens.load(path, **IDS)
    golden = load_file(path / "forward.safetensors")
    ids = golden[f"{case}.input_ids"]
    inputs = {n: golden[f"{case}.{n}"] for n in ("attention_mask",) if f"{case}.{n}" in golden}
    routers: dict[str, Tensor] = {}
    for layer in (0, 2):
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda _m, _a, out, name=f"router_logits{layer}": routers.__setitem__(name, out[0])
        )
    for layer in range(3):
        for name in ("q_norm", "k_norm"):
            getattr(model.model.layers[layer].self_attn, name).register_forward_hook(
                lambda _m, _a, out, name=f"{name}{layer}": routers.__setitem__(name, out.flatten(0, 2))
            )
    seen = {**collect(model, ids, **inputs), **routers}
    compared = 0
    for name, expected in golden.items():
        key = name.removeprefix(f"{case}.")
        if name.startswith(f"{case}.") and key not in ("input_ids", *inputs):
            torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
            compared += 1
    # Embedding, final norm, logits; per layer block, attention, pattern, MLP and both norms; two routers.
    assert compared == 3 + 6 * 3 + 2
    expected = forward64(model, ids, inputs.get("attention_mask"))["logits"]
    torch.testing.assert_close(golden[f"{case}.logits"].double(), expected, atol=2e-5, rtol=2e-4)


def test_the_checkpoint_is_recognised_by_its_class(tmp_path: Path) -> None:
    assert json.loads((MOE / "config.json").read_text())["model_type"] == "llada"
    model: Any = dlm_lens.load(MOE, **IDS)
    check_hook_points(model)
    assert (model.config.model_type, type(model).__name__) == ("lladamoe", "LLaDAMoEModelLM")
    model.save_pretrained(tmp_path)
    original, written = load_file(MOE / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    values, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path, MOE))
    for name in (
        "dense_intermediate_size",
        "expert_intermediate_size",
        "moe_layer_freq",
        "rope_theta",
        "num_experts",
    ):
        assert values[name] == theirs[name]
    again = dlm_lens.load(tmp_path)
    ids = torch.tensor([[3, 4, 155, 5]])
    assert again(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    (family,) = [family for family in dlm_lens.families() if family.name == "llada_moe"]
    assert family.special_ids[157184] == {"mask": 156895, "eos": 156892}


@pytest.mark.parametrize(
    ("option", "value"),
    [("shared_expert_intermediate_size", 24), ("moe_router_enable_expert_bias", True), ("clip_qkv", 8.0),
     ("qk_layernorm", False), ("partial_rotary_factor", 0.5)],
)  # fmt: skip
def test_other_networks_are_refused(option: str, value: Any, tmp_path: Path) -> None:
    config = json.loads((MOE / "config.json").read_text()) | {option: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((MOE / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"{option}={value}; only"):
        dlm_lens.load(tmp_path, **IDS)


def test_it_denoises_records_and_follows_hooks() -> None:
    model, prompts = tiny("llada_moe"), [[1, 2, 3, 4], [5, 6]]
    run = dlm_lens.denoise(model, prompts, gen_length=8, block_length=4, steps=8)
    for step in range(run.steps):
        for row in range(2):
            keep = run.attention_mask[row]
            likely = forward64(model, run.canvases[step, row][keep][None])["logits"][0].softmax(-1).amax(-1)
            found = run.confidence[step, row][keep]
            known = found.isfinite()
            torch.testing.assert_close(found[known].double(), likely[known], atol=1e-5, rtol=1e-5)
    recording = dlm_lens.record(
        model, prompts, [dlm_lens.ReceivedAttention(min_viewers=1)], gen_length=8, block_length=4, steps=8
    )
    assert recording.run.canvases.equal(run.canvases)
    kept = forward64(model, run.canvases[0, :1])
    received = dlm_lens.received_of(recording)
    torch.testing.assert_close(
        received.column_sums[0, 0, 1].double(), kept["pattern1"][0].sum(-2), atol=2e-5, rtol=2e-4
    )
    hooked = dlm_lens.denoise(
        model, prompts, gen_length=8, block_length=4, steps=8, hooks=[dlm_lens.hooks.mask_top_sinks(2)]
    )
    assert not hooked.tokens.equal(run.tokens)


@pytest.mark.parametrize("changes", [{}, {"steps": 8}, {"cfg_scale": 1.0}], ids=str)
def test_dllm_s_sampler_over_an_independent_network_gives_the_same_trajectory(changes: dict[str, Any]) -> None:
    """dllm runs LLaDA-MoE with its MDLM sampler, whose numbers are LLaDA's where the steps divide the block."""
    model: Any = dlm_lens.load(MOE, **IDS)
    settings: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 4, **changes}
    prompts = [[3, 4, 9, 20, 7], [11, 30]]

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        return forward64(model, ids, mask)["logits"].float()

    canvases, ranks = plain_dllm(logits, prompts, mask=IDS["mask_token_id"], fill=0, **settings)
    run = dlm_lens.denoise(model, prompts, **settings)
    assert run.steps == len(ranks) == settings["steps"]
    for row, prompt in enumerate(prompts):
        keep, size = run.attention_mask[row], len(prompt) + 8
        for step, canvas in enumerate(canvases):
            assert run.canvases[step, row, keep].equal(canvas[row, :size])
        for step, confidence in enumerate(ranks):
            found = run.confidence[step, row, keep].float()
            torch.testing.assert_close(found, confidence[row, :size], atol=1e-5, rtol=1e-4)
