"""A bridge's recorder against the recording of the native model, family by family, and under a hook."""

import pytest
import torch

import dlm_lens
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import (
    ReceivedAttention,
    record,
)
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
