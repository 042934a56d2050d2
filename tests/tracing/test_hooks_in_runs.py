"""`attn.apply(hook, step)`: in a trace a hook does what it does in `dlm_lens.denoise`, or is refused as there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import PointContext
from dlm_lens.hooks import (
    Hook,
    ablate,
    at_layers,
    at_progress,
    at_steps,
    by_row,
    mask_positions,
    mask_sinks,
    mask_tokens,
    steer,
    steer_along,
    until_committed,
    zero_value,
)
from dlm_lens.testing import tiny
from tests.adapters.small_architectures import small_model
from tests.bridging.test_hooks_as_native import CLOSE, Keeping, Masking, same

PROMPT = [[5, 9, 11, 3]]
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4, "seed": 0}
MASK = 63


def traced(lm: Any, hook: Any, **settings: Any) -> Any:
    with lm.generate(PROMPT, **settings) as tracer:
        for step in tracer.steps:
            for layer in lm.layers:
                layer.attn.apply(hook, step)
        run = tracer.result.save()
    return run


def edited(step: int, canvas: Tensor) -> Tensor | None:
    """The first token masked at steps 0 and 2, and at step 2 another one written."""
    if step not in (0, 2):
        return None
    canvas = canvas.clone()
    canvas[:, 0] = MASK
    if step == 2:
        canvas[:, 5] = 1
    return canvas


HOOKS: dict[str, Any] = {
    "masked tokens": mask_tokens("mask"),
    "a token": mask_tokens(1),
    "masked positions": ablate("resid", "masked"),
    "the prompt": ablate("mlp_out", "prompt"),
    "progress": at_progress(ablate("z"), (0.3, 1)),
    "clean sinks": mask_sinks(dl.AboveMean(1.0), source="clean"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_the_canvas_that_the_trace_edited(name: str) -> None:
    model, hook = tiny("llada"), HOOKS[name]
    lm = dl.DiffusionLM(model, check=False)
    wanted = dl.denoise(model, PROMPT, hooks=[hook], on_canvas=edited, **SETTINGS)
    with lm.generate(PROMPT, **SETTINGS) as tracer:
        progress = [].save()
        for step in tracer.steps:
            if step in (0, 2):
                lm.canvas[:, 0] = MASK
                if step == 2:
                    lm.canvas[:, 5] = 1
            progress.append(step.progress.tolist())
            for layer in lm.layers:
                layer.attn.apply(hook, step)
        run = tracer.result.save()
    same(run, wanted)
    assert progress[1] == pytest.approx(wanted.progress[1].tolist()), "what is open at step 0 is the answer"


@pytest.mark.parametrize("name", ["masked tokens", "masked positions", "clean sinks"])
def test_hooks_see_the_canvas_that_another_observer_leaves(name: str) -> None:
    model, hook = tiny("llada"), HOOKS[name]
    wanted = dl.denoise(model, PROMPT, hooks=[hook], observers=[Masking()], **SETTINGS)
    same(traced(dl.DiffusionLM(model, check=False), hook, observers=[Masking()], **SETTINGS), wanted)


@pytest.mark.parametrize("family", ["sdar", "bd3lm", "llada2", "fast_dllm_v2", "diffusion_gemma"])
def test_in_an_invoke_of_block_diffusion_the_rows_are_the_invokes(family: str) -> None:
    model, hook, prompts = tiny(family), mask_positions(by_row([1]), stage="after"), ([5, 9, 11], [6, 2])
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(gen_length=8, seed=[0, 1]) as tracer:
        with tracer.invoke([prompts[0]]):
            for step in tracer.steps[:2]:
                for layer in lm.layers:
                    layer.attn.apply(hook, step)
            first = tracer.result.save()
        with tracer.invoke([prompts[1]]):
            second = tracer.result.save()
    for row, run, hooks in ((0, first, [at_steps(hook, [0, 1])]), (1, second, [])):
        alone = dl.denoise(model, [prompts[row]], gen_length=8, seed=row, hooks=hooks)
        padding = int(run.padding[0])
        # Later steps may see another draw: rows share one network, and a tie is decided by the last bits.
        found, wanted = run.confidence[0, 0, padding:], alone.confidence[0, 0]
        length = min(len(found), len(wanted))
        torch.testing.assert_close(found[:length], wanted[:length], **CLOSE)
        assert found.isfinite().any()


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("steps", [[2, 3], [0, 9, 10, 11, 12, 13, 14, 15], [5, 9]])
def test_clean_sinks_beside_a_cache_do_not_depend_on_the_steps_that_are_visited(
    cache: str, steps: list[int]
) -> None:
    """Steps 0 and 8 pass over the whole canvas; the pass without hooks is made up for where they are left out."""
    model, hook = tiny("llada"), mask_sinks(dl.TopK(2), source="clean")
    settings: dict[str, Any] = {"steps": 16, "gen_length": 16, "block_length": 8, "cache": cache}
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [5, 9]]
    wanted = dl.denoise(model, prompts, hooks=[at_steps(hook, steps)], logits="all", **settings)
    assert not torch.equal(wanted.tokens, dl.denoise(model, prompts, logits="all", **settings).tokens)
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(prompts, **settings) as tracer:
        for step in tracer.steps[steps]:
            for layer in lm.layers:
                layer.attn.apply(hook, step)
        run = tracer.result.save()
    same(run, wanted)


def test_hooks_in_an_edit_act_in_every_run_of_the_copy() -> None:
    model, hook = tiny("llada"), at_steps(mask_tokens(9), [0])
    lm = dl.DiffusionLM(model, check=False)
    with lm.edit() as (tracer, copy):
        for step in tracer.steps[0]:
            for layer in copy.layers:
                layer.attn.apply(hook, step)
    for prompt in (PROMPT, [[1, 2, 9, 9, 4]]):
        same(copy.generate(prompt, **SETTINGS), dl.denoise(model, prompt, hooks=[hook], logits="all", **SETTINGS))
    # A run that failed leaves nothing behind.
    with pytest.raises(KeyError, match="mine"):
        with lm.generate([[9] * 8], **SETTINGS) as tracer:
            for step in tracer.steps[0]:
                raise KeyError("mine")
    same(copy.generate(PROMPT, **SETTINGS), dl.denoise(model, PROMPT, hooks=[hook], logits="all", **SETTINGS))
    same(lm.generate(PROMPT, **SETTINGS), dl.denoise(model, PROMPT, logits="all", **SETTINGS))


SCANNED = {
    **HOOKS,
    "columns": mask_positions(0),
    "values": ablate("resid", [0]),
    "zero": zero_value(0),
}


@pytest.mark.parametrize("name", SCANNED)
def test_a_scan_with_hooks_has_the_shapes_of_the_run(name: str) -> None:
    lm = dl.DiffusionLM(tiny("llada"), check=False)
    with lm.scan(PROMPT, fn=lm.generate, **SETTINGS) as tracer:
        shapes = [].save()
        for step in tracer.steps:
            lm.layers[0].attn.apply(SCANNED[name], step)
            shapes.append(list(lm.layers[1].attn.pattern.shape))
    assert shapes == [[1, 4, 12, 12]] * 4
    with pytest.raises(ValueError, match="step 99 is not there"):
        with lm.scan(PROMPT, fn=lm.generate, **SETTINGS) as tracer:
            for step in tracer.steps:
                lm.layers[0].attn.apply(at_steps(SCANNED[name], 99), step)


def test_hooks_of_tensors_that_are_made_inside_a_scan() -> None:
    """They read whether the numbers are finite, and of a direction of another width its norm; a scan has none."""
    lm = dl.DiffusionLM(tiny("llada"), check=False)
    with lm.scan(PROMPT, fn=lm.generate, **SETTINGS) as tracer:
        shapes = [].save()
        for step in tracer.steps:
            lm.layers[0].attn.apply(steer(torch.ones(32)), step)
            lm.layers[0].attn.apply(steer_along(torch.ones(2, 32), [0, 1], 0.5), step)
            shapes.append(list(lm.layers[1].attn.pattern.shape))
    assert shapes == [[1, 4, 12, 12]] * 4
    with pytest.raises(ValueError, match=r"Tensor\(\[9\], norm=unknown\), scale=1.0\): resid has \[32\] features"):
        with lm.scan(PROMPT):
            lm.layers[0].output = steer(torch.ones(9))(lm.layers[0].output)


def test_a_scan_of_padded_prompts_has_the_shapes_of_the_run() -> None:
    lm = dl.DiffusionLM(tiny("diffusion_gemma"), check=False)
    prompts, found = [[5, 9, 14, 3, 8], [7, 2, 33]], []
    for trace, given in ((lm.scan, {"fn": lm.generate}), (lm.generate, {})):
        with trace(prompts, gen_length=8, steps=2, **given) as tracer:
            shapes = [].save()
            for _ in tracer.steps[1]:
                shapes.append((lm.layers[1].attn.pattern.shape, lm.layers[1].output.shape))
        found.append(shapes)
    assert found[0] == found[1] != []


class OfLayers(Hook):
    """A hook of a user's own with layers."""

    site, layers = "z", (0,)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        return tensor * 0.1


def test_a_hook_with_layers_of_its_own_acts_in_these() -> None:
    model = tiny("llada")
    lm = dl.DiffusionLM(model, check=False)
    for hook in (OfLayers(), at_layers(ablate("z"), [-1])):
        same(traced(lm, hook, **SETTINGS), dl.denoise(model, PROMPT, hooks=[hook], **SETTINGS))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (at_layers(ablate("z"), [-5]), "layer -5 of 2"),
        (at_layers(ablate("z"), [7]), "layer 7 of 2"),
        (at_steps(ablate("z"), [9]), "step 9 is not there"),
        (mask_positions(99), "position 99 is not there"),
        (until_committed(ablate("z"), torch.zeros(1, 5, dtype=torch.long)), "the run has 1 rows of 12 positions"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_denoise_refuses_is_refused(hook: Any, message: str) -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match=message):
        dl.denoise(model, PROMPT, hooks=[hook], **SETTINGS)
    with pytest.raises(ValueError, match=message):
        traced(dl.DiffusionLM(model, check=False), hook, **SETTINGS)


def test_a_number_is_no_step() -> None:
    lm = dl.DiffusionLM(tiny("llada"), check=False)
    with (
        pytest.raises(TypeError, match="apply: step is 0; give the step of the loop"),
        lm.generate(PROMPT, **SETTINGS) as tracer,
    ):
        for step in tracer.steps:
            lm.layers[0].attn.apply(ablate("z"), int(step))


@pytest.mark.parametrize("hook", [zero_value(-2), at_steps(ablate("k", [1]), [0])], ids=["value", "key"])
def test_an_ar_run_with_a_cache_takes_no_hooks(hook: Any) -> None:
    model = tiny("causal")
    lm = dl.DiffusionLM(model, check=False)
    with pytest.raises(ValueError, match=r"keeps keys and values in a cache.*use_cache=False"):
        traced(lm, hook, gen_length=6)
    wanted = dl.denoise(model, PROMPT, hooks=[hook], gen_length=6)
    same(traced(lm, hook, gen_length=6, use_cache=False), wanted)
    plain = dl.denoise(model, PROMPT, gen_length=6)
    assert not torch.allclose(plain.confidence, wanted.confidence, **CLOSE)


@pytest.mark.parametrize("family", ["llada", "sdar", "dream"])
def test_positions_that_cannot_be_unmasked_are_not_said_to_be(family: str) -> None:
    model = tiny(family)
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(PROMPT, gen_length=8, seed=0) as tracer:
        for step in tracer.steps[1]:
            lm.sampler.unmasked = torch.ones_like(step.masked)
        run = tracer.result.save()
    assert torch.equal(run.unmasked[1], run.masked[1] & ~run.masked[2])
    assert bool(run.unmasked[1].any())
    assert bool((run.step_of[:, : run.prompt_length] == -1).all())


def test_a_resumed_run_has_the_steps_that_are_left() -> None:
    model, kept = tiny("llada"), Keeping()
    whole = dl.denoise(model, PROMPT, observers=kept, **SETTINGS)
    lm = dl.DiffusionLM(model, check=False)
    with lm.generate(PROMPT, resume=kept.after(2), **SETTINGS) as tracer:
        every, last = [].save(), [].save()
        for step in tracer.steps:
            every.append(int(step))
            last.append(lm.layers[0].output.clone())
        run = tracer.result.save()
    assert torch.equal(run.canvases, whole.canvases)
    assert every == [2, 3]
    with lm.generate(PROMPT, resume=kept.after(2), **SETTINGS) as tracer:
        for step in tracer.steps[3]:
            third = lm.layers[0].output.save()
    torch.testing.assert_close(third, last[1])
    assert not torch.allclose(last[0], last[1])


@pytest.mark.parametrize("what", ["canvas", "proposal"])
def test_a_token_that_the_model_does_not_embed_is_named(what: str) -> None:
    lm = dl.DiffusionLM(tiny("llada"), check=False)
    with (
        pytest.raises(ValueError, match=r"wrote token id 999, which has no row in the model's embedding of 64"),
        lm.generate(PROMPT, **SETTINGS) as tracer,
    ):
        for step in tracer.steps[1]:
            if what == "canvas":
                lm.canvas[:, -1] = 999
            else:
                lm.sampler.proposal = torch.full_like(step.tokens, 999)


@pytest.mark.parametrize("site", ["resid", "z"])
@pytest.mark.parametrize(("model_type", "attending"), [("qwen3_5_text", 3), ("jamba", 4)])
def test_layers_without_attention_are_passed_over(
    model_type: str, attending: int, site: Any, tmp_path: Path
) -> None:
    """Hooks count the layers that attend, a trace all of them."""
    small_model(model_type).save_pretrained(tmp_path)
    model = dl.load(tmp_path)
    lm, hook = dl.DiffusionLM(model), at_layers(ablate(site), [-1])
    settings: dict[str, Any] = {"gen_length": 3, "use_cache": False}
    wanted = dl.denoise(model, PROMPT, hooks=[hook], **settings)
    with lm.generate(PROMPT, **settings) as tracer:
        for step in tracer.steps:
            lm.layers[attending].attn.apply(hook, step)
        run = tracer.result.save()
    same(run, wanted)
    # Random weights: a head's part of the stream is small.
    assert not torch.equal(wanted.confidence, dl.denoise(model, PROMPT, **settings).confidence)
