"""Parity with the original LLaDA2: intermediates, router, names of the checkpoint, config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.config_fields import built_config
from dlm_lens.adapters.families.llada2 import LLaDA2Config, LLaDA2ForMaskedLM
from dlm_lens.adapters.group_limited_experts import ROUTER_POINTS
from dlm_lens.attention import check_hook_points
from dlm_lens.testing import tiny
from tests.adapters.golden import CLOSE, GOLDEN, cases, collect
from tests.adapters.test_a2d_qwen3 import normed
from tests.reference import forward64

LLADA2 = GOLDEN / "llada2"
IDS = {name: json.loads((LLADA2 / "sampling.json").read_text())[name] for name in ("mask_token_id", "eos_token_id")}


def routed(model: Any, ids: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What passes through the routers' hook points, under the golden's names."""
    seen: dict[str, Tensor] = {}
    handles = [
        getattr(layer.mlp.gate, f"hook_{name}").register_forward_hook(
            lambda _m, _a, out, key=f"{name}{index}": seen.__setitem__(key, out.view(*ids.shape, -1))
        )
        for index, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
        for name in ROUTER_POINTS
    ]
    model(input_ids=ids, **inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize(("path", "case"), cases(LLADA2))
@torch.no_grad()
def test_every_intermediate_equals_the_original(path: Path, case: str, experts: str) -> None:
    model = dl.load(path, **IDS)
    model.set_experts_implementation(experts)
    golden = load_file(path / "forward.safetensors")
    stored = {key.removeprefix(f"{case}."): value for key, value in golden.items() if key.startswith(f"{case}.")}
    ids, visible = stored.pop("input_ids"), stored.pop("attention_bias").bool()
    stored.pop("logits_bfloat16", None)
    inputs = {"attention_mask": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)}
    seen = {**collect(model, ids, **inputs), **normed(model, ids, inputs), **routed(model, ids, inputs)}
    for key, expected in stored.items():
        torch.testing.assert_close(seen[key], expected, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")
    # Embedding, final norm, logits; per layer block, q, k, v, norms, pattern, z, both outputs; per router three.
    assert len(stored) == 3 + 10 * 3 + 3 * 2


@torch.no_grad()
def test_without_a_mask_every_position_sees_every_other() -> None:
    model, golden = dl.load(LLADA2, **IDS), load_file(LLADA2 / "forward.safetensors")
    torch.testing.assert_close(model(input_ids=golden["full.input_ids"]).logits, golden["full.logits"], **CLOSE)


@torch.no_grad()
def test_bfloat16_is_near_the_original() -> None:
    model = dl.load(LLADA2, dtype="bfloat16", **IDS)
    golden = load_file(LLADA2 / "forward.safetensors")
    visible = golden["block_causal.attention_bias"].bool()
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    logits = model(input_ids=golden["block_causal.input_ids"], attention_mask=mask).logits
    difference = (logits.float() - golden["block_causal.logits_bfloat16"].float()).abs()
    # Equal on the machine that wrote them; another CPU's sums differ by a few ulps of logits of up to 8.
    assert difference.max() <= 0.25
    assert difference.mean() < 0.02
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        {"use_qkv_bias": True, "use_bias": True},
        {"use_qk_norm": False, "num_experts_per_tok": 1, "partial_rotary_factor": 1.0},
        {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
        {"num_shared_experts": 0, "num_experts": 12, "n_group": 6, "moe_intermediate_size": 10},
    ],
)
@torch.no_grad()
def test_options_of_the_config(config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("llada2", **config)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            value.normal_(std=0.3)
    ids = torch.arange(12).view(2, 6)
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits.double(), forward64(model, ids)["logits"], atol=2e-5, rtol=2e-4)
    model.save_pretrained(tmp_path)
    assert dl.load(tmp_path)(input_ids=ids).logits.equal(logits)


def test_saving_writes_the_original_names(tmp_path: Path) -> None:
    model = dl.load(LLADA2, **IDS)
    check_hook_points(model)
    model.save_pretrained(tmp_path)
    original, written = load_file(LLADA2 / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(original[name].equal(written[name]) for name in original)
    before, after = (json.loads((path / "config.json").read_text()) for path in (LLADA2, tmp_path))
    for name in ("architectures", "auto_map", "dtype", "transformers_version", "rope_scaling", "eos_token_id"):
        before.pop(name)
    assert {name: after[name] for name in before} == before


def test_released_checkpoints() -> None:
    (family,) = [family for family in dl.families() if family.name == "llada2"]
    assert family.special_ids[157184] == {"mask": 156895, "eos": 156892}
    assert set(family.hub_samplers) <= set(family.hub_names)
    assert set(family.hub_block_lengths.values()) == {32}
    others = {"LLaDA2.1": "llada2_editing", "DMax": "dmax", "MBD": "multi_block", "LLaDA2.2": "llada2_levenshtein"}
    assert family.hub_samplers == {
        name: sampler for name in family.hub_names for part, sampler in others.items() if f"/{part}-" in name
    }


@torch.no_grad()
def test_a_router_chooses_in_float32_under_autocast() -> None:
    """Its product was in bfloat16, in which other experts were chosen in training."""
    gate = tiny("llada2").model.layers[1].mlp.gate
    states = torch.randn(50, gate.hidden_dim, generator=torch.Generator().manual_seed(0))
    wanted = gate(states)
    with torch.autocast("cpu", torch.bfloat16):
        found = gate(states)
    assert all(one.dtype == two.dtype and one.equal(two) for one, two in zip(found, wanted, strict=True))


@torch.no_grad()
def test_a_hook_on_the_router_chooses_experts() -> None:
    model, ids = tiny("llada2"), torch.arange(12).view(2, 6)
    gate = model.model.layers[1].mlp.gate
    plain = model(input_ids=ids).logits
    forced = torch.tensor([[0, 1]]).expand(12, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "_chosen", lambda scores: forced)
        wanted = model(input_ids=ids).logits
    handle = gate.hook_router_experts.register_forward_hook(lambda *_: forced)
    assert model(input_ids=ids).logits.equal(wanted)
    handle.remove()
    assert not wanted.equal(plain)
    assert model(input_ids=ids).logits.equal(plain)


@torch.no_grad()
def test_a_trace_reads_the_router() -> None:
    model, ids = tiny("llada2"), torch.arange(12).view(2, 6)
    lm: Any = dl.DiffusionLM(model)
    with lm.trace(ids):
        experts = lm.layers[1].mlp.gate.hook_router_experts.output.save()
        weights = lm.layers[1].mlp.gate.hook_router_weights.output.save()
    seen = routed(model, ids, {})
    assert experts.view(2, 6, 2).equal(seen["router_experts1"])
    assert weights.view(2, 6, 2).equal(seen["router_weights1"])


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"score_function": "softmax"}, "score_function='softmax'; only 'sigmoid'"),
        ({"num_experts": 9}, "9 experts in n_group 4"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; 2 groups of 2 experts allow 1 to 4"),
        (
            {"expert_capacity": 9, "block_size": 4},
            "expert_capacity is 9 and block_size 4: .* 2 .* to 8 experts",
        ),
        ({"expert_capacity": 1, "block_size": 4}, "expert_capacity is 1"),
        ({"expert_capacity": 4}, "expert_capacity is 4 and block_size None"),
        ({"delete_token_id": 4}, "delete_token_id is 4 and split_token_id None: LLaDA2.2 has both"),
    ],
)
def test_routers_that_cannot_be(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tiny("llada2", **config)


LATER: dict[str, Any] = {"expert_capacity": 3, "block_size": 4, "delete_token_id": 50, "split_token_id": 51}
"""Fields that LLaDA2.2's config.json has and LLaDA2.0's has not."""


@pytest.mark.parametrize(
    "config",
    [
        LATER,
        LATER | {"expert_capacity": 2, "num_experts_per_tok": 1},
        LATER | {"block_size": 5},
        {"expert_capacity": 0},
    ],
)
@torch.no_grad()
def test_tokens_of_a_block_share_their_experts(config: dict[str, Any]) -> None:
    """LLaDA2.2's router against one entry by entry, in float64: alone, and beside padding on either side."""
    model = tiny("llada2", **config)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            value.normal_(std=0.3)
    ids, padding = torch.arange(26).view(2, 13), torch.zeros(2, 3, dtype=torch.long)
    logits = forward64(model, ids)["logits"]
    close = {"atol": 2e-5, "rtol": 2e-4}
    torch.testing.assert_close(model(input_ids=ids).logits.double(), logits, **close)
    left, right = torch.cat([padding, ids], 1), torch.cat([ids, padding], 1)
    mask = torch.ones_like(left).index_fill(1, torch.arange(3), 0)
    found = model(input_ids=left, attention_mask=mask).logits[:, 3:]
    torch.testing.assert_close(found.double(), logits, **close)
    # As block diffusion calls it: a mask of blocks, in which positions alone say what is padding.
    visible = mask.bool()[:, None, None] & torch.ones(16, 16, dtype=torch.bool)
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(input_ids=left, attention_mask=bias, position_ids=places).logits[:, 3:]
    torch.testing.assert_close(found.double(), logits, **close)
    found = model(input_ids=right, attention_mask=mask.flip(-1)).logits[:, :13]
    torch.testing.assert_close(found.double(), logits, **close)


@torch.no_grad()
def test_fewer_experts_for_a_block_are_other_ones() -> None:
    """Without the block's choice a token has others: the test above would not see a router that ignores it."""
    ids = torch.arange(26).view(2, 13)
    few, all_ = tiny("llada2", **LATER), tiny("llada2", **LATER | {"expert_capacity": 8})
    assert not few(input_ids=ids).logits.equal(all_(input_ids=ids).logits)
    experts = routed(few, ids, {})["router_experts1"]
    assert all(len(row[start : start + 4].unique()) <= 3 for row in experts for start in range(0, 13, 4))
    assert any(len(row[start : start + 4].unique()) > 3 for row in routed(all_, ids, {})["router_experts1"]
               for start in range(0, 13, 4))  # fmt: skip


@torch.no_grad()
def test_a_cached_pass_begins_with_a_block_of_the_router() -> None:
    from transformers import DynamicCache

    model, ids = tiny("llada2", **LATER), torch.arange(12).view(1, 12)
    causal = torch.tensor([[key // 4 <= query // 4 for key in range(12)] for query in range(12)])[None, None]
    bias = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    whole = model(input_ids=ids, attention_mask=bias).logits
    for start in (8, 6):
        cache = DynamicCache()
        model.model(input_ids=ids[:, :start], attention_mask=bias[..., :start, :start], past_key_values=cache,
                    use_cache=True)  # fmt: skip
        given = {"attention_mask": bias[..., start:, :], "position_ids": torch.arange(start, 12)[None]}
        if start == 6:
            with pytest.raises(
                ValueError, match="blocks of 4 tokens, and a pass with 6 cached tokens begins at token 6"
            ):
                model.model(input_ids=ids[:, start:], past_key_values=cache, **given)
            continue
        state = model.model(input_ids=ids[:, start:], past_key_values=cache, **given).last_hidden_state
        torch.testing.assert_close(model.lm_head(state), whole[:, start:], **CLOSE)


def test_activation_checkpointing_computes_the_router_of_the_pass_again() -> None:
    """Two passes before the backward one: each has its own blocks when it is computed again."""
    ids, gradients = torch.arange(26).view(2, 13), []
    for checkpointing in (False, True):
        model = tiny("llada2", **LATER).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        mask = torch.ones_like(ids).index_fill(1, torch.arange(3), 0)
        first, second = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits[:, 3:]
        (first.square().mean() + second.square().mean()).backward()
        gradients.append([value.grad for value in model.parameters() if value.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-5)


def test_a_checkpoint_of_llada2_2_in_the_original_format(tmp_path: Path) -> None:
    model, ids = tiny("llada2", **LATER), torch.arange(10)[None]
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LLaDA2MoeModelLM"]
    assert {name: values[name] for name in LATER} == LATER
    # The authors' file has no field of ours; groups stand in it unread, also such as would not fit.
    for name in ("sampler", "sampler_defaults", "trained_block_length", "mask_token_id"):
        values.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_group": 5, "topk_group": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [62, 40]}))
    loaded = dl.load(tmp_path, mask_token_id=63)
    assert loaded.config.eos_token_id == [62, 40]
    assert loaded(input_ids=ids).logits.equal(model(input_ids=ids).logits)
    run = dl.denoise(loaded, [[1, 2]], gen_length=2)
    assert (run.settings["sampler"], run.settings["block_length"]) == ("llada2_levenshtein", 4)
    other = dl.load(tmp_path, mask_token_id=63, sampler="llada2_editing")
    assert dl.denoise(other, [[1, 2]], gen_length=2).settings["sampler"] == "llada2_editing"


def test_a_checkpoint_without_an_expert(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tiny("llada2").save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    del held["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    missing = r"missing keys model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight; fetch the files again"
    with pytest.raises(ValueError, match=missing):
        dl.load(tmp_path)


@pytest.mark.long
def test_released_checkpoints_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of the hub's name is found before the hub."""
    own, dmax = ("LLaDA2.0-mini", "LLaDA2.1-mini"), ("DMax-16B", "DMax-Math-16B", "DMax-Coder-16B")
    names = [*(f"inclusionAI/{name}" for name in own), *(f"Zigeng/{name}" for name in dmax)]
    names.append("SJTU-DENG-Lab/MBD-Math-LLaDA2-mini-16B")
    samplers = ("llada2", "llada2_editing", "dmax", "dmax", "dmax", "multi_block")
    for name, sampler in zip(names, samplers, strict=True):
        (tmp_path / name).mkdir(parents=True)
        tiny("llada2").save_pretrained(tmp_path / name)
        monkeypatch.chdir(tmp_path)
        model = dl.load(name)
        assert type(model).__name__ == "LLaDA2ForMaskedLM"
        run = dl.denoise(model, [[1, 2]], gen_length=2)
        assert (run.settings["sampler"], run.settings["block_length"], run.tokens.shape[1]) == (sampler, 32, 32)
        with pytest.warns(UserWarning, match="block_length is 4, but the model was trained with blocks of 32"):
            dl.denoise(model, [[1, 2]], gen_length=2, block_length=4)
    assert tiny("llada2", model_type="llada21_moe").sampler_defaults["editing_threshold"] == 0.9


def test_the_released_sizes_give_16_billion_parameters() -> None:
    """Sizes of LLaDA2.0-mini in public copies of its config.json; numbers may come without a decimal point."""
    sizes: dict[str, Any] = {
        "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512,
        "first_k_dense_replace": 1, "use_bias": False, "rope_theta": 600000, "routed_scaling_factor": 2,
        "score_function": "sigmoid", "norm_topk_prob": True, "moe_router_enable_expert_bias": True,
    }  # fmt: skip
    config = built_config(LLaDA2Config, sizes, "config.json")
    with torch.device("meta"):
        model = LLaDA2ForMaskedLM(config)
    experts = 19 * 257 * 3 * 512 * 2048  # with the shared one
    attention = 20 * (2048 * (16 + 2 * 4) * 128 + 16 * 128 * 2048 + 2 * 128 + 2 * 2048)
    others = 3 * 2048 * 5120 + 19 * 256 * 2048 + 2 * 157184 * 2048 + 2048
    assert sum(value.numel() for value in model.parameters()) == experts + attention + others
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 600000, "partial_rotary_factor": 0.5}
