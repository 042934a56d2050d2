"""Mixtures of experts, and DiffusionGemma, where a pass has shapes alone."""

from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import dlm_lens as dl
from dlm_lens.placement import seeded
from dlm_lens.probes import serial_depth
from dlm_lens.testing import tiny

MIXTURES = ["llada2", "llada_moe", "rnd1", "diffusion_gemma"]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_scan_has_the_shapes_of_a_pass(family: str) -> None:
    model = tiny(family)
    lm: Any = dl.DiffusionLM(model, check=False)
    set_before = model.config._experts_implementation
    with lm.scan("w3 w4 w5"):
        shapes = [list(lm.layers[layer].attn.pattern.shape) for layer in range(2)].save()
    with lm.trace("w3 w4 w5"):
        found = [list(lm.layers[layer].attn.pattern.shape) for layer in range(2)].save()
    assert shapes == found
    assert model.config._experts_implementation == set_before == "grouped_mm"
    with lm.scan("w3 w4 w5", fn=lm.generate, gen_length=4, steps=4):
        in_run = list(lm.layers[1].attn.pattern.shape).save()
    with lm.generate("w3 w4 w5", gen_length=4, steps=4):
        computed = list(lm.layers[1].attn.pattern.shape).save()
    assert in_run == computed


@pytest.mark.parametrize("family", MIXTURES)
def test_the_depth_on_the_meta_device_is_the_one_on_the_cpu(family: str) -> None:
    model = tiny(family)
    model.set_experts_implementation("batched_mm")
    on_cpu = serial_depth(model, 16)
    on_meta = serial_depth(model.to("meta"), 16)
    assert (on_meta.layers, on_meta.logits) == (on_cpu.layers, on_cpu.logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_grouped_products_without_shapes_are_refused(family: str) -> None:
    model = tiny(family).to("meta")
    with pytest.raises(ValueError, match=r"no grouped products of torch\.float32 on the meta device.*batched_mm"):
        serial_depth(model)
    assert serial_depth(model.to(torch.bfloat16), 16).logits > 0


def _mixtral() -> Any:
    """A causal mixture of experts of transformers, with hook points."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, vocab_size=64, num_hidden_layers=2, num_local_experts=4)
    with seeded(0):
        return dl.add_hook_points(MixtralForCausalLM(config).eval())


KINDS = [*((family, None) for family in MIXTURES), ("sdar", "sdar_moe"), ("mixtral", None)]


@pytest.mark.parametrize(("family", "model_type"), KINDS)
def test_a_mixture_that_is_cast_to_float64_computes_its_experts_one_by_one(
    family: str, model_type: str | None
) -> None:
    ids = torch.tensor([[3, 4, 5]])
    model: Any = _mixtral() if family == "mixtral" else tiny(family, model_type=model_type)
    experts: Any = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    random = torch.Generator().manual_seed(0)
    states = torch.randn(5, experts.gate_up_proj.shape[-1], generator=random)
    chosen, weights = torch.tensor([[0, 2], [1, 3], [1, 3], [0, 2], [3, 0]]), torch.rand(5, 2, generator=random)

    def by_hand(states: torch.Tensor) -> torch.Tensor:
        up, down = experts.gate_up_proj.data, experts.down_proj.data
        rows = []
        for state, picked, weight in zip(states, chosen, weights.to(states.dtype), strict=True):
            gates, values = (up[picked] @ state).chunk(2, -1)
            inner = experts.act_fn(gates) * values
            rows.append(weight @ (down[picked] @ inner[..., None]).squeeze(-1))
        return torch.stack(rows)

    with torch.no_grad():
        single = model(ids).logits
        torch.testing.assert_close(experts(states, chosen, weights), by_hand(states), atol=1e-4, rtol=1e-4)
        wide = model.double()(ids).logits
        found = experts(states.double(), chosen, weights.double())
        torch.testing.assert_close(found, by_hand(states.double()), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(wide, single.double(), atol=1e-4, rtol=1e-4)
        assert model.config.get_text_config()._experts_implementation == "grouped_mm"
        assert model.float()(ids).logits.equal(single)
