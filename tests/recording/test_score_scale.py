"""`Recording.scale`: the factor of the scores that attention used."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dlm_lens as dl
from dlm_lens.recording import ReceivedAttention, Recording
from dlm_lens.testing import tiny
from tests.adapters.small_architectures import small_model

IDS = torch.arange(3, 9)[None]


def recorded(model: torch.nn.Module, **options: list[int]) -> Recording:
    with torch.no_grad(), dl.record_forward(model, [ReceivedAttention()], **options) as passes:
        model(input_ids=IDS)
    return passes.recording


def test_it_is_what_attention_used() -> None:
    # OPT multiplies its queries by `scaling`, and calls attention with 1.
    assert recorded(dl.add_hook_points(small_model("opt"))).scale == 1.0
    assert recorded(tiny("llada")).scale == pytest.approx(8**-0.5)


def test_it_is_none_where_layers_differ(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 128}
    config = AutoConfig.for_model("gpt2", **sizes, scale_attn_by_inverse_layer_idx=True)
    model = dl.add_hook_points(AutoModelForCausalLM.from_config(config).eval())
    assert recorded(model).scale is None
    assert recorded(model, layers=[2]).scale == pytest.approx(16**-0.5 / 3)
    found = recorded(model)
    found.save(tmp_path / "recording")
    assert Recording.load(tmp_path / "recording").scale is None
    assert found.to_xarray().attrs["score_scale"] == ""


def test_a_bridge_has_the_scale_of_each_layer() -> None:
    model = tiny("diffugpt", scale_attn_by_inverse_layer_idx=True)
    bridge = dl.bridge(model)
    scales: dict[int, float] = {}
    recorder = dl.BridgeRecorder(bridge, [ReceivedAttention()])
    show = recorder.tap.show
    recorder.tap.show = lambda shown: (scales.update({shown.inputs.layer: shown.inputs.scale}), show(shown))
    run = bridge.denoise([IDS[0].tolist()], steps=2, gen_length=4, observers=recorder)
    assert recorder.recording(run).scale is None
    assert scales[1] == pytest.approx(scales[0] / 2)
