"""`plan_run` against the operations that torch counts in a run, and the bytes of a run's tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dlm_lens as dl
from dlm_lens.sampling.run_plan import plan_run
from dlm_lens.testing import tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"steps_per_block": 5, "stability_threshold": None},
    "llada": {"steps": 16},
    "llada_moe": {"steps": 16},
    "diffugpt": {"steps": 16},
    "rnd1": {"steps": 16},
    "duo": {"steps": 16},
    "modernbert": {"steps": 16},
    "a2d_qwen3": {"steps": 16},
    "wedlm": {"entropy_threshold": 0.0},
    "sdlm": {"threshold": 1.0},
    "i_dlm": {"stride": 1},
    "nemotron_labs_diffusion": {"parallel": False, "block_length": 8},
    "efficient_dlm": {"parallel": False, "block_length": 8},
    "stable_diffcoder": {"parallel": False},
}


@pytest.mark.parametrize("family", SETTINGS)
def test_operations_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.config._experts_implementation = "eager"  # torch does not count grouped products
    if family == "diffusion_gemma":
        model.set_experts_implementation("eager")
        model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.config.save_pretrained(tmp_path)
    plan = plan_run(str(tmp_path), prompt_length=9, rows=2, gen_length=16, **SETTINGS[family])
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("hooked")  # nor the fused kernel of a CPU
    with FlopCounterMode(display=False) as counter:
        run = dl.denoise(model, ids, gen_length=16, **SETTINGS[family])
    assert run.steps == plan.steps
    counted = counter.get_total_flops()
    # A masked model's head runs on the positions that are still masked; the plan counts the whole answer.
    assert counted <= 1.02 * plan.flops
    assert plan.flops <= (1.05 if family == "diffusion_gemma" else 1.2) * counted
    unique = {id(each): each.numel() for each in model.parameters()}
    assert plan.parameters == sum(unique.values())


LONGER: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("sink_llama", 8, {"num_sinks": 16}, {"steps": 16}),
    ("sink_qwen", 8, {"num_sinks": 16, "sink_placement": "end"}, {"steps": 16}),
    ("llada", 8, {}, {"steps": 16, "cfg_scale": 1.0}),
    ("llada", 8, {}, {"steps": 16, "cfg_scale": 1.0, "block_length": 4, "cache": "dual"}),
    ("causal", 100, {}, {}),
    ("sdar", 100, {}, {"block_length": 4}),
    ("sdar", 8, {}, {"block_length": 8}),
    ("nemotron_labs_diffusion", 100, {}, {"block_length": 8, "parallel": False}),
]


@pytest.mark.parametrize(("family", "length", "fields", "settings"), LONGER)
def test_sinks_guidance_and_a_kept_prefix_are_counted(
    family: str, length: int, fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny(family, **fields)
    model.config.eos_token_id = None
    model.config.save_pretrained(tmp_path)
    plan = plan_run(str(tmp_path), prompt_length=length, rows=2, gen_length=16, **settings)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    ids, seen = torch.randint(0, 60, (2, length), generator=torch.Generator().manual_seed(0)), []
    model.set_attn_implementation("hooked")
    first = model.model.layers[0]
    handle = first.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0] * args[0].shape[1]))
    with FlopCounterMode(display=False) as counter:
        dl.denoise(model, ids, gen_length=16, **settings)
    handle.remove()
    assert counter.get_total_flops() <= plan.flops <= 1.2 * counter.get_total_flops()
    # The first token of an AR answer, and of a block after a causal context, comes with the prefix.
    spare = 2 * len(seen) if family in ("causal", "nemotron_labs_diffusion") else 0
    assert sum(seen) <= plan.positions <= sum(seen) + spare


def test_guidance_takes_twice_the_memory_of_a_step(tmp_path: Path) -> None:
    tiny("llada").config.save_pretrained(tmp_path)
    plain, guided = (plan_run(str(tmp_path), gen_length=16, steps=16, cfg_scale=scale) for scale in (0.0, 1.0))
    for name in ("positions", "flops", "cache_bytes", "logit_bytes"):
        assert getattr(guided, name) == 2 * getattr(plain, name)
    assert guided.weight_bytes == plain.weight_bytes
    # Two layers of two key heads of 8 channels, in 2 bytes, for 128 + 16 positions; 52 bytes of each logit.
    assert plain.cache_bytes == 144 * 2 * 2 * (2 * 8) * 2
    assert plain.logit_bytes == 16 * 64 * 52
    for plan in (plain, guided):
        assert plan.memory == pytest.approx(1.1 * (plan.weight_bytes + plan.cache_bytes + plan.logit_bytes))


def test_float64_numbers_are_those_of_a_part_of_the_logits(tmp_path: Path) -> None:
    """Samplers read 2^26 logits at a time on a GPU: 4,096 positions of 64 tokens in 512 rows are twice as many."""
    tiny("llada", max_position_embeddings=8192).config.save_pretrained(tmp_path)
    given: dict[str, Any] = {"gen_length": 4096, "block_length": 4096, "steps": 4}
    half, two = (plan_run(str(tmp_path), rows=rows, **given) for rows in (256, 512))
    assert half.logit_bytes == 2**26 * (20 + 32)
    assert two.logit_bytes == 2**27 * 20 + 2**26 * 32


def test_learned_sinks_have_keys_and_values_too(tmp_path: Path) -> None:
    tiny("sink_llama", num_sinks=16).config.save_pretrained(tmp_path)
    plan = plan_run(str(tmp_path), prompt_length=8, gen_length=4, steps=4)
    assert plan.cache_bytes == (8 + 4 + 16) * 2 * 2 * (2 * 8) * 2


def test_self_conditioning_is_another_product_but_in_the_first_step_of_a_canvas(tmp_path: Path) -> None:
    config: Any = tiny("diffusion_gemma").config
    flops = []
    for width in (64, 164):
        config.text_config.vocab_size = width
        config.save_pretrained(tmp_path)
        plan = plan_run(str(tmp_path), prompt_length=9, rows=2, gen_length=16, **SETTINGS["diffusion_gemma"])
        flops.append(plan.flops)
    assert plan.steps == 10
    # Two canvases of five steps and eight positions, in two rows.
    assert flops[1] - flops[0] == 2 * 32 * 100 * 8 * 2 * (10 + 8)


def test_the_plan_of_a_large_checkpoint_reads_its_config_alone(tmp_path: Path) -> None:
    """Sizes as in a 26B mixture of experts; the number of parameters by hand."""
    text = {
        "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 6,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    }  # fmt: skip
    vision = {"model_type": "gemma4_vision", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    config = {"model_type": "diffusion_gemma", "text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = {bits: plan_run(str(tmp_path), gen_length=512, prompt_length=512, bits=bits) for bits in (16, 4)}
    d, experts = 2816, 128 * 3 * 2816 * 704
    sliding, full = (16 * 256 * 2 + 8 * 256 * 2) * d, (16 * 512 * 2 + 2 * 512) * d
    layer = 3 * d * 2112 + 128 * d
    conditioning = 3 * d * 2112
    dense = 5 * sliding + full + 6 * layer + conditioning
    assert plans[16].active == pytest.approx(dense + 6 * experts / 16, rel=2e-3)
    assert plans[16].parameters == pytest.approx(dense + 6 * experts + 262144 * d, rel=5e-3)
    assert plans[16].weight_bytes == pytest.approx(2 * plans[16].parameters, rel=1e-2)
    saved = plans[16].weight_bytes - plans[4].weight_bytes
    assert saved == pytest.approx(1.5 * (dense + 6 * experts), rel=2e-3)
    assert plans[16].cache_bytes == 1024 * 4 * (5 * 8 * 256 + 2 * 512)
    assert plans[16].steps == 96
    with pytest.raises(ValueError, match="names no model_type, and a plan reads no weights"):
        plan_run(str(Path(__file__).parent.parent / "golden" / "sedd"))
    with pytest.raises(ValueError, match="rows 0"):
        plan_run(str(tmp_path), rows=0)
    with pytest.raises(ValueError, match="no setting 'cache'"):
        plan_run(str(tmp_path), cache="prefix")
