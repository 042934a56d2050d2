"""A bridge's recorder against the recording of the native model, family by family, and under a hook."""

import pytest
import torch

import dlm_lens
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import ReceivedAttention, ResidualNorm, ValueNorm, record
from dlm_lens.testing import tiny
from tests.recording.reference import EVERYTHING, FAMILIES, PROMPTS, build, settings


@pytest.mark.parametrize("family", [*FAMILIES, "gated"])
def test_the_bridge_records_what_the_model_does(family):
    model = tiny("sink_qwen", gated_attention=True) if family == "gated" else build(tiny, family)
    wanted = record(model, PROMPTS, EVERYTHING, **settings(family))
    bridge = dlm_lens.bridge(model)
    recorder = dlm_lens.BridgeRecorder(bridge, EVERYTHING)
    run = bridge.denoise(PROMPTS, observers=recorder, **settings(family))
    assert torch.equal(run.canvases, wanted.run.canvases)
    found = recorder.recording(run)
    assert found.scale == wanted.scale
    for name in wanted.specs:
        a, b = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(a, b, equal_nan=True, rtol=2e-4, atol=2e-5, msg=name)
    assert not any(point._forward_hooks for point in bridge.hook_points())


def test_under_a_hook_and_with_a_cache():
    model = tiny("llada")
    given = settings("llada")
    bridge = dlm_lens.bridge(model)
    recorder = dlm_lens.BridgeRecorder(bridge, [ReceivedAttention()], layers=[1])
    hook = mask_positions(-2)
    run, cache = bridge.denoise_with_cache(
        PROMPTS, names_filter="blocks.1.attn.hook_pattern", hooks=[hook], observers=recorder, **given
    )
    found = recorder.recording(run)
    assert float(found.received[:, 0, :, :, -2].abs().max()) == 0.0
    sums = cache["blocks.1.attn.hook_pattern"][:, 0].sum(-2)
    torch.testing.assert_close(found.received_sums()[:, 0, 0], sums, rtol=1e-4, atol=1e-5)
    native = record(model, PROMPTS, [ReceivedAttention()], layers=[1], hooks=[hook], **given)
    torch.testing.assert_close(found.received, native.received, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_statistics_that_compatibility_mode_changes_are_named(caplog):
    biased = tiny("dream")
    for name, bias in biased.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias.data)
    folded, centred = "folded the value biases", "centred the residual stream"
    for model, options, changed, message in (
        (biased, {}, "value_norm", folded),
        (biased, {"fold_value_biases": False}, "", ""),
        (tiny("diffugpt"), {"fold_value_biases": False}, "residual_norm", centred),
        (tiny("diffugpt"), {"fold_value_biases": False, "center_writing_weights": False}, "", ""),
        (tiny("llada"), {}, "", ""),
    ):
        reducers = [ReceivedAttention(), ValueNorm(), ResidualNorm()]
        given = {"gen_length": 4, "steps": 2, "seed": 0}
        wanted = record(model, PROMPTS, reducers, **given)
        bridge = dlm_lens.bridge(model)
        bridge.enable_compatibility_mode(disable_warnings=True, **options)
        recorder = dlm_lens.BridgeRecorder(bridge, reducers)
        caplog.clear()
        found = recorder.recording(bridge.denoise(PROMPTS, observers=recorder, **given))
        for name in wanted.specs:
            a, b = getattr(found, name).nan_to_num(), getattr(wanted, name).nan_to_num()
            # Weights are processed in float32: 2e-4 of the largest value; what changes does so by more than 5%.
            difference = float((a - b).abs().max() / b.abs().max())
            assert difference > 0.05 if name == changed else difference < 2e-4, (name, difference, options)
        warned = [each.getMessage() for each in caplog.records if each.name == "dlm_lens.bridging.recorder"]
        assert len(warned) == bool(changed)
        assert all(each.startswith(f"{changed}: compatibility mode has {message}") for each in warned)
