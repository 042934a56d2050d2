"""Hooks in a bridge do what they do in `dlm_lens.denoise`, whatever the point, the observers and the filters."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_layers, at_steps, mask_tokens, mask_top_sinks, steer, zero_value
from dlm_lens.sampling import FinishedStep, Resumption, RunObserver, StepPlan, StoredRun
from dlm_lens.testing import tiny
from tests.bridging.cases import model_of

PROMPT = [[5, 9, 11, 3]]
SETTINGS: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4, "seed": 0}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # other kernels


def same(found: dl.DenoisingRun, wanted: dl.DenoisingRun) -> None:
    assert torch.equal(found.canvases, wanted.canvases)
    torch.testing.assert_close(found.confidence, wanted.confidence, **CLOSE)


@pytest.mark.parametrize("site", ["q", "k"])
@pytest.mark.parametrize("case", ["sdar", "qwen3"])
def test_queries_and_keys_are_those_after_a_norm_of_each_head(case: str, site: Any) -> None:
    model = model_of(case)
    heads = model.config.num_attention_heads if site == "q" else model.config.num_key_value_heads
    hook = steer(torch.randn(heads, 10, generator=torch.Generator().manual_seed(3)), 0.5, site=site)
    wanted = dl.denoise(model, PROMPT, hooks=[hook], gen_length=8, seed=0)
    same(dl.bridge(model).denoise(PROMPT, hooks=[hook], gen_length=8, seed=0), wanted)
    plain = dl.denoise(model, PROMPT, gen_length=8, seed=0)
    shared = min(plain.steps, wanted.steps)
    assert not torch.allclose(plain.confidence[:shared], wanted.confidence[:shared], **CLOSE)


class Masking(RunObserver):
    """Masks the first token again, at step 2."""

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        if plan.index != 2:
            return canvas
        canvas = canvas.clone()
        canvas[:, 0] = 63
        return canvas


@pytest.mark.parametrize("hook", [mask_tokens("mask"), ablate("resid", "masked")], ids=["tokens", "activation"])
def test_hooks_see_the_canvas_that_another_observer_leaves(hook: Any) -> None:
    model = tiny("llada")
    assert model.config.mask_token_id == 63
    wanted = dl.denoise(model, PROMPT, hooks=[hook], observers=[Masking()], **SETTINGS)
    same(dl.bridge(model).denoise(PROMPT, hooks=[hook], observers=[Masking()], **SETTINGS), wanted)


def test_equal_hooks_that_reach_a_point_by_different_filters_keep_their_own_memory() -> None:
    model, hook = tiny("llada"), mask_top_sinks(1, source="previous")
    wanted = dl.denoise(model, PROMPT, hooks=[hook, hook], **SETTINGS)
    once = dl.denoise(model, PROMPT, hooks=[hook], **SETTINGS)
    assert not torch.allclose(once.confidence, wanted.confidence, **CLOSE)
    bridge = dl.bridge(model)
    by_end, by_word = (lambda name: name.endswith("hook_attn_scores")), (lambda name: "attn_scores" in name)
    same(bridge.denoise(PROMPT, hooks=[hook, hook], **SETTINGS), wanted)
    same(bridge.denoise(PROMPT, fwd_hooks=[(by_end, hook)], hooks=[hook], **SETTINGS), wanted)
    same(bridge.denoise(PROMPT, fwd_hooks=[(by_end, hook), (by_word, hook)], **SETTINGS), wanted)


class Keeping(RunObserver):
    """Keeps what a run could be resumed with after each step."""

    keeps_state = True

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.steps: list[FinishedStep] = []

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        self.seen = canvas, masked
        return canvas

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Any, unmasked: Tensor) -> None:
        self.steps.append(
            FinishedStep(plan=plan, canvas=self.seen[0], masked=self.seen[1], proposal=proposal, unmasked=unmasked)
        )

    def keep(self, state: Any) -> None:
        self.states.append(state)

    def after(self, count: int) -> Resumption:
        """The first `count` steps."""
        return Resumption(tuple(self.steps[:count]), self.states[count - 1])


def test_a_resumed_run_caches_the_steps_that_it_runs() -> None:
    model, kept = tiny("llada"), Keeping()
    whole = dl.denoise(model, PROMPT, observers=kept, **SETTINGS)
    point, bridge = "blocks.1.attn.hook_pattern", dl.bridge(model)
    run, cache = bridge.denoise_with_cache(PROMPT, names_filter=point, resume=kept.after(2), **SETTINGS)
    assert torch.equal(run.canvases, whole.canvases)
    assert cache.steps == (2, 3)
    every = bridge.denoise_with_cache(PROMPT, names_filter=point, **SETTINGS)[1]
    assert torch.equal(cache[point, 3], every[point, 3])
    with pytest.raises(ValueError, match="cache_steps: step 9 is not there: the run has 4 steps, 0 to 3"):
        bridge.denoise_with_cache(PROMPT, names_filter=point, cache_steps=9, resume=kept.after(2), **SETTINGS)
    # Steps before the first one were counted, and an empty cache was returned of them alone.
    given: dict[str, Any] = {"names_filter": point, "resume": kept.after(2), **SETTINGS}
    assert bridge.denoise_with_cache(PROMPT, max_bytes=cache.nbytes, **given)[1].steps == (2, 3)
    assert bridge.denoise_with_cache(PROMPT, cache_steps=slice(1, 3), **given)[1].steps == (2,)
    for wrong in (1, [0, 3], slice(0, 2)):
        with pytest.raises(ValueError, match=r"has step [01], which a resumed run does .* give steps from 2 to 3"):
            bridge.denoise_with_cache(PROMPT, cache_steps=wrong, **given)


@pytest.mark.parametrize("hook", [zero_value(1), steer(torch.ones(4, 8), 0.1, site="v")], ids=["zero", "steer"])
def test_values_that_a_step_reads_from_a_cache_are_not_in_a_bridge(hook: Any) -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"with cache='dual': a bridge's v has the positions that a step computes"):
        dl.bridge(model).denoise(PROMPT, hooks=[hook], cache="dual", **SETTINGS)


@pytest.mark.parametrize("site", ["v", "k"])
def test_an_edit_of_a_value_is_of_one_step_and_that_of_a_key_is_kept(site: Any) -> None:
    model = tiny("llada")
    given = {**SETTINGS, "cache": "dual", "block_length": 8}
    # In the last layer, whose edits reach no kept key of another.
    whole, edit = dl.denoise(model, PROMPT, **given), at_layers(ablate(site, [1]), [-1])
    assert whole.computed[:2] == (None, (4, 12))  # position 1 is read at step 1, and not computed

    def changed(at: list[int]) -> bool:
        with torch.no_grad():
            runs = [StoredRun(model, whole, hooks=hooks, warn=False) for hooks in ([], [at_steps(edit, at)])]
            plain, edited = (run.states(1) for run in runs)
        return not torch.allclose(plain, edited, **CLOSE)

    assert changed([1]) == (site == "v")
    assert changed([0]) == (site == "k")


def test_a_cached_activation_is_what_it_was_before_a_later_hook_edited_it_in_place() -> None:
    bridge = dl.bridge(tiny("llada"))

    def zeros(resid: Tensor, hook: Any) -> Tensor:
        return resid.zero_()

    name = "blocks.0.hook_resid_post"
    edits = [("blocks.1.hook_resid_pre", zeros)]
    cache = bridge.denoise_with_cache(PROMPT, names_filter=name, fwd_hooks=edits, **SETTINGS)[1]
    plain = bridge.denoise_with_cache(PROMPT, names_filter=name, **SETTINGS)[1]
    assert torch.equal(cache[name, 0], plain[name, 0])


@pytest.mark.parametrize(
    ("fwd_hooks", "message"),
    [
        ([mask_tokens("mask")], r"fwd_hooks takes pairs \(name or filter of names, function\), not mask_tokens"),
        ([(lambda name: name == "nowhere", mask_tokens("mask"))], "matches no hook point; see bridge.hook_dict"),
    ],
    ids=["no pair", "no point"],
)
def test_hooks_without_a_point_are_refused(fwd_hooks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.bridge(tiny("llada")).denoise(PROMPT, fwd_hooks=fwd_hooks, **SETTINGS)


class Writing(RunObserver):
    """Writes an id that no model embeds."""

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        return canvas.masked_fill(masked, 999)


def test_a_token_that_the_model_does_not_embed_is_named() -> None:
    model, message = tiny("llada"), "an edit of the canvas wrote token id 999, which has no row in .* of 64"
    with pytest.raises(ValueError, match=message):
        dl.denoise(model, PROMPT, observers=[Writing()], **SETTINGS)
    with pytest.raises(ValueError, match=message):
        dl.bridge(model).denoise(PROMPT, observers=[Writing()], **SETTINGS)


@pytest.mark.parametrize("case", ["llada", "gated-sink", "qwen3"])
@pytest.mark.parametrize("site", ["q", "z", "mlp_out", "resid"])
def test_a_hook_at_another_point_than_its_own_is_refused_before_a_pass(case: str, site: Any) -> None:
    """`ablate("z")` at the residual stream would otherwise set the whole stream to zero."""
    bridge, hook = dl.bridge(model_of(case)), at_layers(ablate(site), [1])
    own = {"mlp_out": "blocks.1.hook_mlp_out", "resid": "blocks.1.hook_resid_post"}
    normed, gated = ("_normed" if case == "qwen3" else ""), ("_ungated" if case == "gated-sink" else "")
    own |= {"q": f"blocks.1.attn.hook_q{normed}", "z": f"blocks.1.attn.hook_z{gated}"}
    ids, settings = torch.tensor(PROMPT), {"gen_length": 2, "seed": 0}
    for name in ("blocks.1.hook_resid_pre", "blocks.1.attn.hook_v", "ln_final.hook_in", "hook_embed"):
        with pytest.raises(ValueError, match=r"belongs at blocks\.[01]\..* and was put at .*; name that point"):
            bridge.denoise(PROMPT, fwd_hooks=[(name, hook)], **settings)
        with pytest.raises(ValueError, match=r"belongs at blocks\.[01]\..* and was put at .*; name that point"):
            bridge.run_with_hooks(ids, fwd_hooks=[(name, hook)])
        with pytest.raises(ValueError, match=r"belongs at blocks\.[01]\..* and was put at .*; name that point"):
            bridge.add_hook(name, hook)
    assert not any(point.has_hooks() for point in bridge.hook_points())
    named = bridge.denoise(PROMPT, fwd_hooks=[(own[site], hook)], **settings)
    same(named, bridge.denoise(PROMPT, hooks=[hook], **settings))
    filtered = bridge.denoise(PROMPT, fwd_hooks=[(lambda name: name == own[site], hook)], **settings)
    same(filtered, named)


def test_hooks_are_refused_without_a_batch_and_in_a_backward_pass() -> None:
    """`remove_batch_dim` wraps them in functions, so that their hook point could not be checked."""
    bridge, ids, hook = dl.bridge(tiny("llada")), torch.tensor(PROMPT), ablate("z")
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.hook_z'.* do not run under remove_batch_dim=True"):
        bridge.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_z", hook)], remove_batch_dim=True)
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn.*do not run in a backward pass"):
        bridge.run_with_hooks(ids, bwd_hooks=[("blocks.0.attn.hook_z", hook)])
    seen = []
    own = [("blocks.0.attn.hook_z", lambda value, hook: seen.append(value.ndim))]
    bridge.run_with_hooks(ids, fwd_hooks=own, remove_batch_dim=True)
    assert seen == [3]
