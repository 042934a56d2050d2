"""Observers of a run under hooks see the run's passes, as the hooks left them, and no other."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import hidden_per_map
from dlm_lens.bridging import BridgeRecorder
from dlm_lens.hooks import ablate, at_heads, attach_hooks, keep_only, mask_positions, mask_sinks, mask_top_sinks
from dlm_lens.recording import ReceivedAttention, UpdateNorm, WeightedValue
from dlm_lens.testing import tiny
from tests.hooks.test_compositions import HOLES, PROMPTS, Looks

RUN: dict[str, Any] = {"gen_length": 6, "steps": 3}
CLEAN = mask_top_sinks(2, source="clean")


def recorder_of(host: str, model: Any, bridged: Any, reducers: list[Any]) -> Any:
    return dl.Recorder(model, reducers) if host == "denoise" else BridgeRecorder(bridged, reducers)


@pytest.mark.parametrize("host", ["denoise", "bridge"])
def test_a_pass_without_hooks_is_not_recorded(host: str) -> None:
    model = tiny("llada")
    bridged = dl.bridge(model)
    recorder = recorder_of(host, model, bridged, [ReceivedAttention(), UpdateNorm()])
    shown: list[int] = []
    show = recorder.tap.show

    def counted(layer: Any) -> None:
        shown.append(layer.inputs.layer)
        show(layer)

    recorder.tap.show = counted
    run = (model if host == "denoise" else bridged, PROMPTS)
    options = {**RUN, "hooks": [CLEAN, ablate("attn_out")], "observers": recorder}
    done = dl.denoise(*run, **options) if host == "denoise" else bridged.denoise(PROMPTS, **options)
    assert shown == [0, 1] * 3
    recorded = recorder.recording(done)
    content = recorded.valid[None, :, None].expand(recorded.update_norm.shape)
    assert recorded.update_norm[content].abs().max() == 0
    assert recorded.mixed_norm.nan_to_num().max() > 0.1


@pytest.mark.parametrize("host", ["denoise", "bridge"])
def test_what_is_mixed_is_recorded_as_hooks_left_it(host: str) -> None:
    model = tiny("sink_qwen", num_sinks=1, gated_attention=True)
    bridged = dl.bridge(model)
    recorder = recorder_of(host, model, bridged, [UpdateNorm()])
    options = {**RUN, "hooks": [at_heads(ablate("z"), [1])], "observers": recorder}
    done = dl.denoise(model, PROMPTS, **options) if host == "denoise" else bridged.denoise(PROMPTS, **options)
    mixed = recorder.recording(done).mixed_norm.nan_to_num().amax((0, 1, 2, 4))
    assert mixed[1] == 0
    assert mixed[[0, 2, 3]].min() > 0.1


def test_a_trace_of_several_prompts_gives_each_its_own() -> None:
    model = tiny("smdm")
    lm = dl.DiffusionLM(model, check=False)
    options = {**RUN, "remasking": "greedy", "cfg_scale": 3.0}
    hooks = [keep_only((), 4, stage="after"), mask_sinks(dl.AboveMean(0.2), source="clean", stage="after")]
    found = []
    with lm.generate(**options) as tracer:
        for prompt in HOLES:
            with tracer.invoke(prompt):
                for step in tracer.steps[:]:
                    for layer in range(2):
                        for hook in hooks:
                            lm.layers[layer].attn.apply(hook, step)
                found.append(tracer.result.save())
    for prompt, run in zip(HOLES, found, strict=True):
        alone = dl.denoise(model, [prompt], hooks=hooks, **options)
        content = run.attention_mask[0]
        assert run.canvases[:, 0, content].equal(alone.canvases[:, 0])
        assert not alone.confidence.equal(dl.denoise(model, [prompt], **options).confidence)


@pytest.mark.long
def test_a_pass_without_hooks_sees_the_canvas_that_a_trace_edited() -> None:
    model = tiny("llada")
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for step in tracer.steps[:]:
            canvas = lm.canvas
            if step == 1:
                canvas[:, -1] = 5
            for layer in range(2):
                lm.layers[layer].attn.apply(CLEAN, step)
        traced = tracer.result.save()

    def edit(step: int, canvas: torch.Tensor) -> torch.Tensor:
        if step == 1:
            canvas[:, -1] = 5
        return canvas

    ours = dl.denoise(model, PROMPTS, hooks=[CLEAN], on_canvas=edit, **RUN)
    assert ours.canvases[1:].equal(traced.canvases[1:])
    # float32 sums in another order.
    torch.testing.assert_close(ours.confidence, traced.confidence, atol=2e-5, rtol=1e-5)


def test_outside_a_run_an_earlier_hook_hides_keys_but_no_queries() -> None:
    model = tiny("llada")
    ids = torch.tensor([PROMPTS[0]])
    hooks = [mask_positions(3), keep_only((), 5, stage="after"), mask_top_sinks(2, stage="after")]
    with torch.no_grad(), attach_hooks(model, *hooks[:2]):
        streamed = model(input_ids=ids).logits
    with torch.no_grad(), attach_hooks(model, *hooks[:2], Looks("scores"), Looks("pattern")):
        torch.testing.assert_close(model(input_ids=ids).logits, streamed, atol=2e-5, rtol=1e-5)
    bridged = dl.bridge(model)
    points = [
        (f"blocks.{i}.attn.hook_{p}", h)
        for i in (0, 1)
        for p, h in zip(("attn_scores", "pattern", "pattern"), hooks, strict=True)
    ]
    with torch.no_grad(), attach_hooks(model, *hooks):
        ours = model(input_ids=ids).logits
    torch.testing.assert_close(bridged.run_with_hooks(ids, fwd_hooks=points), ours, atol=2e-5, rtol=1e-5)


def test_equal_hooks_are_counted_one_by_one() -> None:
    model = tiny("llada")
    hook = mask_top_sinks(2, stage="after")
    run = dl.denoise(model, PROMPTS, hooks=[hook, hook], **RUN)
    first, second = run.settings["mass_hidden"]
    # What the first one hid is gone where the second one looks, and it ranks what is left.
    assert run.settings["columns_hidden"] == (2.0, 2.0)
    assert first > second > 0
    bridged = dl.bridge(model).denoise(PROMPTS, hooks=[hook, hook], **RUN)
    assert bridged.settings["mass_hidden"] == pytest.approx((first, second), rel=1e-4)  # float32 sums
    assert hidden_per_map({("columns hidden", hook, (hook, 0)): [6, 3], "other": 1}, hook) == 2.0


def test_a_weighted_value_of_a_class_is_a_sum_over_its_queries() -> None:
    model = tiny("causal", model_type="llama")
    reducers = [WeightedValue("prompt"), WeightedValue(), ReceivedAttention(("all", "prompt"), min_viewers=1)]
    recorded = dl.record(model, PROMPTS, reducers, gen_length=4)
    written = recorded.valid & recorded.run.masked[0]
    for step in range(1, 4):
        there = written & ~recorded.run.masked[step]
        values = recorded.weighted_value_prompt[step].permute(0, 3, 1, 2)
        # No query of the prompt sees what was written after it: a sum over none, where the score is undefined.
        assert values[there].abs().max() == 0
        assert recorded.received_prompt[step].permute(0, 3, 1, 2)[there].isnan().all()
        assert values[~recorded.valid | recorded.run.masked[step]].isnan().all()
        ratio = recorded.weighted_value[step] / recorded.received_sums()[step]
        prompt = (recorded.received_sums("prompt")[step] * ratio).permute(0, 3, 1, 2)[recorded.valid & ~written]
        expected = values[recorded.valid & ~written]
        torch.testing.assert_close(prompt, expected, rtol=1e-4, atol=1e-5)  # float32, two quotients


@pytest.mark.parametrize("callback", ["on_canvas", "on_logits"])
@pytest.mark.parametrize("host", ["denoise", "bridge"])
def test_a_call_in_a_callback_is_without_the_hooks_and_the_recorder_of_the_run(host: str, callback: str) -> None:
    model = tiny("llada")
    bridged = dl.bridge(model)

    def denoised(prompt: Any, **options: Any) -> dl.DenoisingRun:
        return dl.denoise(model, prompt, **options) if host == "denoise" else bridged.denoise(prompt, **options)

    def inside() -> dl.DenoisingRun:
        return denoised([[9, 8, 7, 6, 5], [4, 3]], gen_length=4, steps=2, hooks=[ablate("attn_out", "open")])

    def outside(call: Any) -> tuple[dl.DenoisingRun, torch.Tensor]:
        recorder = recorder_of(host, model, bridged, [ReceivedAttention()])
        # "masked" and the sinks of the step before need the run's step, and the clean pass is one more.
        hooks = [CLEAN, ablate("z", "masked"), mask_sinks(dl.TopK(1), source="previous")]
        run = denoised(PROMPTS, **RUN, hooks=hooks, observers=recorder, **{callback: call})
        return run, recorder.recording(run).received

    def other(*_: Any) -> None:
        if not found:
            dl.replay(model, expected, [mask_positions(1)], attention=False)
        found.append(inside())

    found: list[dl.DenoisingRun] = []
    expected = inside()
    (run, received), (again, received_again) = (outside(call) for call in (lambda *_: None, other))
    assert len(found) == RUN["steps"] + (callback == "on_canvas")
    for one in found:
        assert one.canvases.equal(expected.canvases)
        assert one.confidence.nan_to_num().equal(expected.confidence.nan_to_num())
    assert again.canvases.equal(run.canvases)
    assert again.confidence.nan_to_num().equal(run.confidence.nan_to_num())
    assert received_again.nan_to_num().equal(received.nan_to_num())
    assert again.settings["columns_hidden"] == run.settings["columns_hidden"]
