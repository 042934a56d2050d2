"""`StoredRun`: hooks and network find of earlier steps what the run had, or what passes without hooks leave."""

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.registry import families
from dlm_lens.attention import attach_hooks, hooked_attentions
from dlm_lens.hooks import (
    Hook,
    HookWrapper,
    PointContext,
    ablate,
    at_encoder,
    at_steps,
    capture,
    freeze_sinks,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
    patch_from,
)
from dlm_lens.probes import LogProbability, activation_patching, attribution_patching, commitment
from dlm_lens.recording import ReceivedAttention, UpdateNorm, ValueNorm, rerun
from dlm_lens.sampling import StoredRun, part_of_run
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40]]
LONG = [[5, 9, 11, 3, 17], [6, 2, 40, 7, 8]]
CACHED: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "cache": "prefix", "seed": 1}
REDUCERS = [ReceivedAttention(min_viewers=1), UpdateNorm(), ValueNorm()]
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


def check(model: Any, hooks: list[Any], prompts: Any = PROMPTS, **settings: Any) -> Any:
    """Record under hooks; reruns of all steps and of the last one alone are the recording."""
    recorded = dl.record(model, prompts, REDUCERS, hooks=hooks, **settings)
    for steps in (None, [recorded.run.steps - 1]):
        found = rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=steps)
        wanted = recorded if steps is None else recorded.select(step=steps)
        for name in recorded.specs:
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **CLOSE, msg=f"{name} {steps}")
    return recorded


# The number of steps that were planned.


@pytest.mark.parametrize(
    ("family", "hook", "settings"),
    [
        ("mdlm", at_steps(ablate("mlp_out", None, "zero"), [-1]), {"steps": 4, "gen_length": 8}),
        ("sedd", at_steps(ablate("mlp_out", None, "zero"), [-1]), {"steps": 24, "gen_length": 8}),
        ("llada", at_steps(mask_top_sinks(1), [8]), {**CACHED, "cache": None, "threshold": 0.05}),
        ("llada", freeze_sinks(dl.TopK(1), step=9), {**CACHED, "cache": None, "threshold": 0.05}),
        ("llada2", at_steps(ablate("mlp_out", None, "zero"), slice(-3, None)), {"steps": 8, "gen_length": 8}),
    ],
    ids=str,
)
def test_steps_of_a_hook_count_in_the_planned_run(family: str, hook: Any, settings: dict[str, Any]) -> None:
    model = tiny(family)
    recorded = check(model, [hook], **{name: value for name, value in settings.items() if value is not None})
    assert recorded.run.planned is not None
    assert recorded.run.planned > recorded.run.steps


def test_the_planned_number_of_steps_is_stored_and_joined(tmp_path: Path) -> None:
    model = tiny("llada")
    settings = {**CACHED, "threshold": 0.05}
    recorded = dl.record(model, PROMPTS, REDUCERS, to=tmp_path / "run", batch_size=1, **settings)
    assert (recorded.run.planned, dl.Recording.load(tmp_path / "run").run.planned) == (12, 12)
    assert recorded.select(step=0).run.planned == 12
    assert recorded.run.steps < 12


# What one step leaves for the network at the next.


@pytest.mark.parametrize("conditions", ["logits", "top", "none"])
@pytest.mark.parametrize(
    "hook", [mask_top_sinks(2), ablate("mlp_out", [-2], "zero"), mask_top_sinks(1, source="previous")], ids=str
)
def test_a_step_is_conditioned_on_the_logits_under_the_hooks(hook: Any, conditions: str) -> None:
    model = tiny("diffusion_gemma")
    check(model, [hook], LONG, steps=4, gen_length=8, seed=1, self_conditioning=conditions)


def test_commitment_under_hooks_reads_the_logits_of_the_run() -> None:
    model, hook, logits = tiny("diffusion_gemma"), mask_top_sinks(2), []
    settings: dict[str, Any] = {"steps": 4, "gen_length": 8, "seed": 1}
    keep = lambda *given: logits.append(given[-1].clone())  # noqa: E731
    run = dl.denoise(model, LONG, hooks=[hook], on_logits=keep, **settings)
    found = commitment(model, run, hooks=[hook])
    read = found.token >= 0
    likely = torch.stack(logits).nan_to_num(-torch.inf)
    likely[..., [i for i in [getattr(model.config, "mask_token_id", None)] if i is not None]] = -torch.inf
    assert found.token[read].equal(likely.argmax(-1)[read])
    assert int(read.sum()) > 20


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(
    "hook",
    [
        mask_top_sinks(2, source="clean"),
        mask_random(like=mask_top_sinks(2, source="clean")),
        mask_sinks(dl.AboveMean(0.5), source="clean", per="layer"),
    ],
    ids=str,
)  # fmt: skip
def test_clean_statistics_of_a_cached_run_have_keys_without_hooks(hook: Any, cache: str) -> None:
    check(tiny("llada"), [hook], **{**CACHED, "cache": cache})


def test_clean_statistics_beside_an_edited_encoder() -> None:
    hooks = [at_encoder(ablate("resid", [0], "zero")), mask_top_sinks(1, source="clean")]
    check(tiny("diffusion_gemma"), hooks, LONG, steps=4, gen_length=8, seed=1, self_conditioning="none")


def test_encoder_hooks_act_at_the_step_at_which_the_encoder_runs() -> None:
    model, hook = tiny("diffusion_gemma"), at_encoder(at_steps(ablate("resid", [0], "zero"), [0]))
    recorded = check(model, [hook], LONG, steps=4, gen_length=8, seed=1)
    run = dl.denoise(model, LONG, steps=4, gen_length=8, seed=1)
    whole = capture(model, run, "resid", hooks=[hook])["resid", 1, 3]
    assert whole.equal(capture(model, run, "resid", hooks=[hook], cache_steps=[3])["resid", 1, 3])
    assert recorded.run.steps >= 4


def test_a_guided_run_is_patched_in_its_conditional_half() -> None:
    model = tiny("llada")
    settings: dict[str, Any] = {"steps": 4, "gen_length": 8, "cfg_scale": 1.0, "seed": 1}
    kept = capture(model, LONG[::-1], "resid", cache_steps=2, **settings)
    check(model, [patch_from(kept, 2)], LONG, **settings)


def test_keys_that_are_not_carried_are_those_of_passes_without_hooks() -> None:
    model, hook = tiny("llada"), mask_positions(-3)
    run = dl.denoise(model, PROMPTS, threshold=0.1, **CACHED)
    step = max(step for step, span in enumerate(run.computed) if span is not None)
    whole = max(step for step, span in enumerate(run.computed[:step]) if span is None)
    plain, fixed = StoredRun(model, run), StoredRun(model, run, hooks=[hook], carried="nothing")
    with torch.no_grad():
        plain.states(whole)
        with plain.at(step), attach_hooks(model, hook):
            wanted = plain.states(step)
        fixed.states(whole)  # under the hook: its keys are not for others
        assert fixed.states(step).equal(wanted)
        assert not StoredRun(model, run, hooks=[hook]).states(step).equal(wanted)


def test_the_logits_of_a_replay_are_conditioned_on_those_without_hooks() -> None:
    model, hook = tiny("diffusion_gemma"), mask_positions(-3)
    run = dl.denoise(model, LONG, steps=4, gen_length=16, seed=1)
    plain, fixed = StoredRun(model, run), StoredRun(model, run, hooks=[hook], carried="keys")
    carried, differs = StoredRun(model, run, hooks=[hook]), []
    with torch.no_grad():
        for step in range(run.steps):
            with plain.at(step), attach_hooks(model, hook):
                wanted = plain.states(step)
            plain.discard(step)  # hooked, and no conditioning for the next
            torch.testing.assert_close(fixed.states(step), wanted, rtol=1e-5, atol=1e-6)
            differs.append(not torch.allclose(carried.states(step), wanted, rtol=1e-3, atol=1e-3))
    first = [step for step in range(run.steps) if step == 0 or run.blocks[step] != run.blocks[step - 1]]
    assert differs == [step not in first for step in range(run.steps)]


# Attribution.


@pytest.mark.parametrize("hook", [mask_top_sinks(1, source="previous"), freeze_sinks(dl.TopK(1), step=1)], ids=str)
def test_a_patched_pass_leaves_nothing_for_the_next_step(hook: Any) -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[1, 2, 3, 4, 5], [8, 9, 10]], seed=1, steps=3, gen_length=6)

    def effects(steps: list[int]) -> Tensor:
        found = activation_patching(model, run, [hook], target=LogProbability(), steps=steps, direction="denoising")
        return found.effects[-1]

    torch.testing.assert_close(effects([2]), effects([1, 2]), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("method", [activation_patching, attribution_patching])
@pytest.mark.parametrize(
    "hook",
    [
        None,
        mask_positions(-3),
        mask_top_sinks(1),
        mask_top_sinks(1, source="previous"),
        mask_sinks(dl.AboveMean(0.5), source="clean", per="layer"),
    ],
    ids=str,
)
def test_keys_in_a_cache_are_fixed_whatever_steps_are_explained(hook: Any, method: Any) -> None:
    model = tiny("llada")
    run = dl.denoise(model, LONG, threshold=0.1, **CACHED)
    first = next(step for step, span in enumerate(run.computed) if span is not None)
    other = torch.tensor([[7, 9, 11, 3, 17], [6, 2, 41, 7, 8]]) if hook is None else [hook]

    def effects(steps: list[int]) -> Tensor:
        effects: Tensor = method(model, run, other, target=LogProbability(), steps=steps).effects[-1]
        return effects

    torch.testing.assert_close(effects([first]), effects([first - 1, first]), rtol=1e-4, atol=1e-5, equal_nan=True)


# Hooks of a user's own, errors, and objects that are used out of order.


@dataclass(frozen=True, eq=False)
class Fading(HookWrapper):
    """A user's wrapper that remembers how often its hook acted, and says only that it is not stateless."""

    hook: Hook
    stateless = False

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        assert hook.run is not None
        seen = hook.run.memory.setdefault(("seen", hook.layer()), set())
        seen.add(hook.run.step)
        edited = self.hook(tensor, hook)
        return tensor + (edited - tensor) / len(seen)


def test_a_wrapper_that_is_not_stateless_may_remember() -> None:
    hook = Fading(ablate("mlp_out", None, "zero"))
    assert hook.remembers
    assert not at_steps(ablate("mlp_out", None, "zero"), [1]).remembers
    check(tiny("llada"), [hook], steps=6, gen_length=12, seed=1)


class Raising(Hook):
    """Raises in layer 1 at one step."""

    site = "resid"
    remembers = False

    def __init__(self, step: int) -> None:
        self.step = step

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        if hook.run is not None and hook.run.step == self.step and hook.layer() == 1:
            raise RuntimeError("stop")
        return tensor


def test_after_an_error_in_a_whole_pass_its_keys_are_made_again() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, threshold=0.1, **CACHED)
    whole = [step for step, span in enumerate(run.computed) if span is None]
    cached = [step for step, span in enumerate(run.computed) if span is not None]
    broken = whole[1]
    before = max(step for step in cached if step < broken)
    hook = Raising(broken)
    stored, wanted = StoredRun(model, run, hooks=[hook]), StoredRun(model, run)
    with torch.no_grad():
        stored.states(0)
        with pytest.raises(RuntimeError, match="stop"):
            stored.states(broken)
        assert not any(attention.hook_z.readers for attention in hooked_attentions(model))
        assert stored.states(before).equal(wanted.states(before))
        hook.step = -1
        for step in (broken, run.steps - 1, 1):
            assert stored.states(step).equal(wanted.states(step)), step


def test_another_step_inside_the_block_of_one_runs_under_the_hooks_once() -> None:
    model, hook = tiny("llada"), ablate("mlp_out", None, torch.full((), 0.5))
    run = dl.denoise(model, PROMPTS, steps=4, gen_length=8, seed=1)
    stored, wanted = StoredRun(model, run, hooks=[hook]), StoredRun(model, run, hooks=[hook])
    with torch.no_grad(), stored.at(2):
        inside = [stored.states(3), stored.states(2)]
    assert inside[0].equal(wanted.states(3))
    assert inside[1].equal(wanted.states(2))
    before = [attention.hook_z.readers for attention in hooked_attentions(model)]
    assert not any(before)


def test_it_goes_when_nothing_refers_to_it() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, threshold=0.1, **CACHED)
    stored = StoredRun(model, run, hooks=[mask_top_sinks(1, source="clean")])
    with torch.no_grad():
        stored.states(1)
    seen = weakref.ref(stored)
    gc.disable()
    try:
        del stored
        assert seen() is None
    finally:
        gc.enable()


def test_hooks_may_come_from_an_iterator() -> None:
    model, hook = tiny("llada"), mask_positions(-3)
    run = dl.denoise(model, PROMPTS, steps=4, gen_length=8, seed=1)
    wanted = rerun(model, run, REDUCERS, hooks=[hook], rows_per_pass=1)
    found = rerun(model, run, REDUCERS, hooks=iter([hook]), rows_per_pass=1)
    assert found.received.nan_to_num().equal(wanted.received.nan_to_num())


def test_a_replay_under_the_runs_hooks_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model, hook = tiny("llada"), mask_positions(-3)
    run = dl.denoise(model, PROMPTS, hooks=[hook], steps=4, gen_length=8)
    dl.replay(model, run, [hook])
    assert not caplog.messages
    dl.replay(model, run, [mask_positions(-2)])
    assert [message.count("under [mask_positions(-2)]") for message in caplog.messages] == [1]


SHORT = {"gen_length": 8, "steps": 4, "steps_per_block": 4, "block_length": 4, "sub_block_length": 2}


@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        (family.name, name)
        for family in families()
        for name in family.samplers
        if (family.name, name) != ("bd3lm", "mdlm")  # of a checkpoint without blocks
    ],
)
def test_a_run_of_every_sampler_is_run_again(family: str, sampler: str) -> None:
    """A sampler for reruns has the network of the run, and no rule of its own."""
    model = tiny(family, sampler=sampler)
    settings = {name: value for name, value in SHORT.items() if name in model.sampler_defaults}
    run = check(model, [], LONG, **settings).run
    assert len(dl.logit_lens(model, run, steps=[run.steps - 1]).position)


# What steps may rewrite.


@pytest.mark.parametrize(
    ("family", "sampler", "settings"),
    [
        (
            "llada2",
            "llada2_editing",
            {"block_length": 4, "threshold": 0.1, "editing_threshold": 0.0, "max_post_steps": 6},
        ),
        ("udlm", "udlm", {"steps": 8}),
    ],
)
def test_rewritten_positions_of_a_row_and_of_a_part_are_those_of_the_run(
    family: str, sampler: str, settings: dict[str, Any]
) -> None:
    """A row is read until its own end, and a step by itself as in the run, though its block began before it."""
    model, given = tiny(family, sampler=sampler), {"gen_length": 8, **settings}
    prompts = [[3, 4, 5], [7, 8, 9, 10, 11]]
    run = dl.denoise(model, prompts, seed=[1, 2], **given)
    whole = StoredRun(model, run, decided=True)
    predicted = torch.stack([whole.predicted(step) for step in range(run.steps)])
    for row, prompt in enumerate(prompts):
        alone = dl.denoise(model, [prompt], seed=[1 + row], **given)
        own = StoredRun(model, alone, decided=True)
        counts = torch.stack([own.predicted(step).sum() for step in range(alone.steps)])
        assert predicted[:, row].sum(-1).tolist() == [*counts.tolist(), *[0] * (run.steps - alone.steps)]
    assert sampler == "udlm" or len(set(run.row_steps.tolist())) == 2
    read = 0
    for step in range(run.steps):
        part = part_of_run(run, [step], range(2))
        assert StoredRun(model, part, decided=True).predicted(0).equal(predicted[step])
        read += int((predicted[step] & ~run.open[step])[run.open[step].sum(-1) == 0].sum())
    assert sampler != "udlm" or read  # where nothing is open
