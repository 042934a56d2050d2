"""Denoising under a bridge's hooks: the run is `dlm_lens.denoise`'s, and hooks know its steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import RunStep
from dlm_lens.bridging.step_hooks import fwd_hooks_of
from dlm_lens.hooks import ablate, attach_hooks, mask_positions
from tests.bridging.cases import CASES, model_of
from tests.reference import forward64

PROMPT = "sort 4 2 9 1 :"
IDS = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


def settings_of(model: Any, **more: Any) -> dict[str, Any]:
    return {"gen_length": 6, **({"steps": 6} if "steps" in model.sampler_defaults else {}), "seed": 3, **more}


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_hooks_is_the_native_run(case: str) -> None:
    """Prompts of unequal length, so padding; SMDM with its guidance and temperature."""
    model = model_of(case)
    want = dl.denoise(model, IDS, **settings_of(model))
    got = dl.bridge(model).denoise(IDS, **settings_of(model))
    assert torch.equal(got.canvases, want.canvases)
    assert torch.equal(got.unmasked, want.unmasked)
    torch.testing.assert_close(got.confidence, want.confidence, atol=1e-4, rtol=1e-4)
    same = {name: value for name, value in want.settings.items() if name != "use_cache"}
    assert {name: value for name, value in got.settings.items() if name != "use_cache"} == same


@pytest.mark.long
@pytest.mark.parametrize("case", ["llada", "dream", "smdm-sink", "zero-sinks", "gated-sink", "llama"])
@pytest.mark.parametrize("stage", ["before_softmax", "after"])
def test_a_hook_of_ours_does_the_same_natively_and_in_the_bridge(case: str, stage: Any) -> None:
    model, hook = model_of(case), mask_positions(2, stage=stage)
    # Dream's own ranking is random; another one shows what the logits are.
    settings = settings_of(model, **({"remasking": "maskgit_plus"} if case == "dream" else {}))
    want = dl.denoise(model, IDS, hooks=[hook], **settings)
    tl = dl.bridge(model)
    got = tl.denoise(IDS, hooks=[hook], **settings)
    place = "attn.hook_attn_scores" if stage == "before_softmax" else "attn.hook_pattern"
    by_name = tl.denoise(IDS, fwd_hooks=[(lambda name: name.endswith(place), hook)], **settings)
    for run in (got, by_name):
        assert torch.equal(run.canvases, want.canvases)
        torch.testing.assert_close(run.confidence, want.confidence, atol=1e-4, rtol=1e-4)
    plain = dl.denoise(model, IDS, **settings)
    assert not torch.equal(want.proposals, plain.proposals) or not torch.allclose(want.confidence, plain.confidence)
    assert got.settings["hooks"] == (repr(hook),)


def test_an_edit_at_one_step_is_that_of_an_independent_network() -> None:
    """Zero one head's z at step 2 only: the confidence of that step, computed in float64 from the canvas."""
    model = model_of("llada")
    seen: list[tuple[int, int]] = []

    def ablate(z: Tensor, hook: Any) -> Tensor | None:
        seen.append((hook.step, hook.layer()))
        if hook.step != 2:
            return None
        z = z.clone()
        z[:, :, 1] = 0.0
        return z

    tl = dl.bridge(model)
    run = tl.denoise([[1, 2, 3]], steps=4, gen_length=4, fwd_hooks=[("blocks.1.attn.hook_z", ablate)])
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1)]

    def head(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, :, 1] = 0.0
        return z

    for step in range(4):
        edits = {(1, "z"): head} if step == 2 else {}
        logits = forward64(model, run.canvases[step], edits=edits)["logits"]
        confidence = logits.softmax(-1).gather(-1, run.proposals[step][..., None]).squeeze(-1)
        eligible = run.confidence[step].isfinite()
        torch.testing.assert_close(
            run.confidence[step][eligible].double(), confidence[eligible], atol=1e-4, rtol=1e-3
        )


def test_the_step_that_a_hook_receives() -> None:
    model = model_of("sink")
    tl = dl.bridge(model)
    received: list[Any] = []
    run = tl.denoise(
        IDS,
        steps=6,
        gen_length=6,
        block_length=3,
        fwd_hooks=[("blocks.0.attn.hook_q", lambda q, hook: received.append(hook))],
    )
    assert len(received) == 6
    for step, hook in enumerate(received):
        assert (hook.step, hook.total, hook.layer(), hook.name) == (step, 6, 0, "blocks.0.attn.q.hook_out")
        assert torch.equal(hook.tokens, run.canvases[step])
        assert torch.equal(hook.masked, run.masked[step])
        assert torch.equal(hook.valid, run.attention_mask)
        assert torch.equal(hook.progress, run.progress[step])
        assert (hook.block, hook.span) == (run.blocks[step], run.spans[step])
        assert hook.sinks == tl.sinks
        assert isinstance(hook.run, RunStep)
        assert "step=" in repr(hook)


def test_guidance_gives_hooks_both_halves() -> None:
    model = model_of("llada")
    shapes: list[Any] = []

    def look(q: Tensor, hook: Any) -> None:
        shapes.append((len(q), len(hook.tokens)))

    settings = {"steps": 2, "gen_length": 4, "cfg_scale": 1.5}
    tl = dl.bridge(model)
    run, cache = tl.denoise_with_cache(
        IDS, names_filter="blocks.0.hook_resid_pre", fwd_hooks=[("blocks.1.attn.hook_q", look)], **settings
    )
    assert shapes == [(4, 4), (4, 4)]
    with pytest.raises(MemoryError):  # both halves were counted beforehand
        tl.denoise_with_cache(IDS, names_filter="blocks.0.hook_resid_pre", max_bytes=cache.nbytes - 1, **settings)
    assert torch.equal(run.canvases, dl.denoise(model, IDS, **settings).canvases)
    embedding = model.get_input_embeddings()
    assert torch.equal(
        cache["blocks.0.hook_resid_pre", 1][:2], embedding(run.canvases[1])
    )  # conditional rows first
    hidden = run.canvases[1].masked_fill(run.canvases[0] != 63, 63)
    assert torch.equal(cache["blocks.0.hook_resid_pre", 1][2:], embedding(hidden))


def test_an_ar_run_has_no_cache_under_hooks() -> None:
    tl = dl.bridge("toy-ar")
    lengths: list[Any] = []

    def look(pattern: Tensor, hook: Any) -> None:
        lengths.append((hook.step, *pattern.shape[-2:], hook.tokens.shape[1], bool(hook.masked.any())))

    run = tl.denoise(PROMPT, gen_length=3, fwd_hooks=[("blocks.0.attn.hook_pattern", look)])
    assert lengths == [(step, 7 + step, 7 + step, 7 + step, False) for step in range(3)]
    assert torch.equal(run.tokens, dl.denoise(tl.original_model, PROMPT, gen_length=3).tokens)
    with pytest.raises(ValueError, match="use_cache=True with hooks"):
        tl.denoise(PROMPT, gen_length=3, use_cache=True)


def test_hooks_are_gone_after_a_run_also_after_a_failed_one() -> None:
    tl = dl.bridge(model_of("llada"))
    fail = RuntimeError("stop here")

    def stop(value: Tensor, hook: Any) -> None:
        raise fail

    with pytest.raises(RuntimeError, match="stop here"):
        tl.denoise(IDS, steps=2, gen_length=2, fwd_hooks=[("blocks.0.hook_mlp_out", stop)])
    assert not tl.list_hooks()
    tl.denoise(IDS, steps=2, gen_length=2)


def test_wrong_names_and_sites_are_refused_before_anything_runs() -> None:
    tl = dl.bridge(model_of("llada"))
    with pytest.raises(KeyError, match="does not exist"):
        tl.denoise(IDS, gen_length=2, fwd_hooks=[("blocks.9.hook_q", lambda t, hook: t)])
    with pytest.raises(ValueError, match="is no hook"):
        tl.denoise(IDS, gen_length=2, hooks=["mask_positions"])

    class Far:
        site, layers = "z", (5,)

        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            return tensor

    with pytest.raises(ValueError, match="layer 5 of 2"):
        tl.denoise(IDS, gen_length=2, hooks=[Far()])


def test_a_function_that_returns_another_shape_is_named_by_its_point() -> None:
    tl = dl.bridge(model_of("llada"))
    wrong = [("blocks.0.hook_resid_post", lambda t, hook: t[:, :3])]
    with pytest.raises(
        ValueError, match=r"the hook at blocks\.0\.hook_resid_post returned a tensor of shape \[2, 3"
    ):
        tl.denoise(IDS, gen_length=2, fwd_hooks=wrong)


def test_a_hook_acts_in_the_layers_that_it_declares() -> None:
    seen: list[str] = []

    class Last:
        site, layers = "resid", (-1,)

        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            seen.append(hook.name)
            return tensor

    dl.bridge(model_of("llada")).denoise(IDS, steps=2, gen_length=2, hooks=[Last()])
    assert seen == ["blocks.1.hook_out"] * 2


def test_hooks_that_ask_find_the_clean_statistics() -> None:
    """`run.clean()` is what keys receive without hooks, also while another hook edits the layers below."""
    model = model_of("sink")
    got: dict[tuple[int, int], Tensor] = {}

    class Reads:
        site, needs_clean_pass = "pattern", True

        def __call__(self, pattern: Tensor, hook: Any = None) -> Tensor:
            got[hook.step, hook.layer()] = hook.run.clean()[hook.layer()].sums
            return pattern * 0.5

    tl = dl.bridge(model)
    run = tl.denoise([[1, 2, 3, 4]], steps=3, gen_length=3, hooks=[Reads()])
    for (step, layer), sums in got.items():
        kept = forward64(model, run.canvases[step])
        want = kept[f"pattern{layer}"][:, :, 1:].sum(-2)  # the sink's own row does not count
        torch.testing.assert_close(sums.double(), want, atol=1e-4, rtol=1e-4)
    assert len(got) == 6


@pytest.mark.parametrize("site", ["q", "rot_k", "v", "z", "attn_out", "mlp_out", "resid"])
def test_every_site_is_where_the_native_model_has_it(site: Any) -> None:
    """Adding a number commutes with nothing: z before or after the gate, q before or after the rotation."""

    class Shift:
        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            return tensor + 0.5

    Shift.site = site  # type: ignore[attr-defined]
    model, settings = model_of("gated-sink"), {"steps": 3, "gen_length": 3}
    want = dl.denoise(model, IDS, hooks=[Shift()], **settings)
    got = dl.bridge(model).denoise(IDS, hooks=[Shift()], **settings)
    assert torch.equal(got.canvases, want.canvases)
    torch.testing.assert_close(got.confidence, want.confidence, atol=1e-4, rtol=1e-4)


def test_folded_value_biases_change_hooks_after_them_and_warn(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = dl.load("toy"), torch.arange(20, 32)[None]
    bridges = [dl.bridge(model) for _ in range(3)]
    bridges[1].enable_compatibility_mode(disable_warnings=True)
    bridges[2].enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    assert [tl.folds_value_biases for tl in bridges] == [False, True, False]
    for hook, folded in (
        (ablate("v", 3), True),
        (ablate("z", 3), True),
        (mask_positions(3, stage="after"), True),
        (mask_positions(3), False),
        (ablate("attn_out", 3), False),
    ):
        with torch.no_grad():
            with attach_hooks(model, hook):
                native = model(ids).logits.log_softmax(-1)
            for tl in bridges:
                caplog.clear()
                found = tl.run_with_hooks(ids, fwd_hooks=fwd_hooks_of(tl, [hook])).log_softmax(-1)
                differs = folded and tl is bridges[1]
                assert bool((found - native).abs().max() > (0.1 if differs else 1e-4)) == differs
                tl.denoise(ids, hooks=[hook], steps=1, gen_length=2)
                messages = [record.getMessage() for record in caplog.records]
                assert len(messages) == 2 * differs
                assert all(f"{hook}: compatibility mode has folded the value biases" in each for each in messages)


def test_a_model_without_value_biases_has_none_to_fold() -> None:
    tl = dl.bridge(model_of("llada"))
    tl.enable_compatibility_mode(disable_warnings=True)
    assert not tl.folds_value_biases
