"""Mixtures of experts, and DiffusionGemma, where a pass has shapes alone."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
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
    with lm.scan("w3 w4 w5", fn=lm.generate, gen_length=4):
        in_run = list(lm.layers[1].attn.pattern.shape).save()
    with lm.generate("w3 w4 w5", gen_length=4):
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


@pytest.mark.parametrize("family", ["llada2", "llada_moe", "rnd1"])
def test_a_mixture_that_is_cast_to_float64_computes_its_experts_one_by_one(family: str) -> None:
    ids, model = torch.tensor([[3, 4, 5]]), tiny(family)
    single = model(ids).logits
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model.double()(ids).logits, single.double(), atol=1e-5, rtol=1e-5)
