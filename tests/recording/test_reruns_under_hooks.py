"""rerun(hooks=): under a run's own hooks it is what `record` had under them, in all steps and rows or in some."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import (
    Hook,
    PointContext,
    ablate,
    at_layers,
    at_steps,
    by_row,
    freeze_sinks,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_top_sinks,
    steer,
    until_committed,
)
from dlm_lens.recording import AttentionPattern, ReceivedAttention, TopKeys, UpdateNorm, ValueNorm, rerun
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS, build, settings

REDUCERS = [ReceivedAttention(("all", "unmasked"), min_viewers=1), UpdateNorm(), ValueNorm(), TopKeys(2)]
# A pass over the rows of a batch alone rounds otherwise than one over all, and so does a fused kernel.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


def steps_of(count: int = 2) -> Tensor:
    return torch.arange(21).expand(count, -1) % 5


HOOKS: dict[str, Any] = {
    "positions": mask_positions(-4, stage="after"),
    "current sinks": mask_top_sinks(2),
    "sinks of the step before": mask_top_sinks(2, source="previous"),
    "sinks of all layers of the step before": mask_top_sinks(1, source="previous", per="model"),
    "sinks of a clean pass": mask_sinks(dl.AboveMean(0.5), source="clean", per="layer"),
    "frozen sinks": freeze_sinks(dl.TopK(2), step=1),
    "frozen from step 3": at_steps(freeze_sinks(dl.TopK(1), step=3), slice(1, None)),
    "random columns": mask_random(like=mask_top_sinks(2, source="previous"), seed=4),
    "window": keep_only(1, window=4, source="previous"),
    "ablation": at_layers(ablate("attn_out", "masked", "zero"), [0]),
    "steering": at_steps(steer(torch.linspace(-1, 1, 32), 2.0, positions="masked"), [2, -1]),
    "by commitment": until_committed(ablate("mlp_out", None, "zero"), steps_of()),
}
REMEMBERS = {
    "sinks of the step before", "sinks of all layers of the step before", "frozen sinks", "frozen from step 3",
    "random columns", "window",
}  # fmt: skip


class Doubling(Hook):
    """A user's hook, which says nothing about itself: the values of a step are scaled by the steps before."""

    site = "v"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        assert hook.run is not None
        seen = hook.run.memory.setdefault(("seen", hook.layer()), set())
        seen.add(hook.run.step)
        return tensor * (1 + len(seen))


def close(found: Any, wanted: Any) -> None:
    assert list(found.specs) == list(wanted.specs)
    for name in wanted.specs:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **CLOSE, msg=name)
    assert (found.layers, found.steps, found.rows) == (wanted.layers, wanted.steps, wanted.rows)
    assert found.hooks == wanted.hooks


def differ(one: Any, two: Any) -> bool:
    return any(
        not torch.allclose(getattr(one, name).float(), getattr(two, name).float(), **CLOSE) for name in one.specs
    )


@pytest.mark.parametrize("name", HOOKS)
def test_under_the_runs_hooks_it_is_what_was_recorded_under_them(name: str) -> None:
    model, hooks = tiny("llada"), [HOOKS[name]]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, **settings("llada"))
    whole = rerun(model, recorded.run, REDUCERS, hooks=hooks)
    close(whole, recorded)
    assert differ(rerun(model, recorded.run, REDUCERS), recorded)
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=[-1, 3]), recorded.select(step=[3, -1]))
    part = rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=[4], rows=[1], layers=[1])
    close(part, recorded.select(step=[4], batch=[1], layer=[1]))
    assert HOOKS[name].remembers == (name in REMEMBERS)


@pytest.mark.parametrize("family", ["mmada", "dream", "diffugpt", "smdm", "sink front", "llama"])
@pytest.mark.parametrize("name", ["current sinks", "frozen sinks", "sinks of a clean pass"])
def test_in_other_families(family: str, name: str) -> None:
    model, hooks = build(tiny, family), [HOOKS[name]]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, **settings(family))
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks), recorded)
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=[4]), recorded.select(step=[4]))


@pytest.mark.parametrize("name", ["current sinks", "sinks of the step before", "sinks of a clean pass"])
def test_of_a_guided_run_the_conditional_half_runs_alone(name: str) -> None:
    model, hooks = tiny("llada"), [HOOKS[name]]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, cfg_scale=1.5, **settings("llada"))
    sizes = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = rerun(model, recorded.run, REDUCERS, hooks=hooks)
    handle.remove()
    assert set(sizes) == {len(PROMPTS)}
    close(found, recorded)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("name", ["current sinks", "sinks of the step before", "ablation"])
def test_of_a_run_with_a_cache_the_kept_keys_are_those_under_the_hooks(name: str, cache: str) -> None:
    model, hooks = tiny("llada"), [HOOKS[name]]
    given: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "threshold": 0.1, "cache": cache}
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, **given)
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks), recorded)
    last = max(step for step, span in enumerate(recorded.run.computed) if span is not None)
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=[last]), recorded.select(step=[last]))


def test_hooks_of_a_users_own_see_the_steps_before() -> None:
    model, hooks = tiny("llada"), [Doubling()]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, **settings("llada"))
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks), recorded)
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks, steps=[1, 4]), recorded.select(step=[1, 4]))


@pytest.mark.parametrize(("name", "passes"), [("ablation", 1), ("positions", 1), ("frozen sinks", 5)])
def test_only_hooks_that_remember_need_the_steps_before(name: str, passes: int) -> None:
    model, hooks = tiny("llada"), [HOOKS[name]]
    run = dl.denoise(model, PROMPTS, hooks=hooks, **settings("llada"))
    calls: list[int] = []
    handle = model.get_decoder().register_forward_hook(lambda *given: calls.append(1))
    rerun(model, run, REDUCERS, hooks=hooks, steps=[4])
    handle.remove()
    assert len(calls) == passes


def test_values_per_row_need_the_rows_of_the_run() -> None:
    """Sinks measured before have a row for each prompt: `rows` are chosen after the pass."""
    model = tiny("llada")
    plain = dl.record(model, PROMPTS, REDUCERS, **settings("llada"))
    hooks = [mask_sinks(dl.TopK(2), source=dl.received_of(plain))]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, **settings("llada"))
    close(rerun(model, recorded.run, REDUCERS, hooks=hooks, rows=[1]), recorded.select(batch=[1]))
    with pytest.raises(ValueError, match="the source has 2 rows and the run 1"):
        rerun(model, recorded.run, REDUCERS, hooks=hooks, rows_per_pass=1)
    own = [mask_top_sinks(2)]
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=own, **settings("llada"))
    close(rerun(model, recorded.run, REDUCERS, hooks=own, rows_per_pass=1), recorded)


def test_what_the_hooks_refuse_is_refused_before_any_pass() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **settings("llada"))
    with pytest.raises(ValueError, match="step 9 is not there"):
        rerun(model, run, REDUCERS, hooks=[at_steps(mask_positions(0), 9)])
    with pytest.raises(ValueError, match="3 is no hook"):
        rerun(model, run, REDUCERS, hooks=[3])
    assert not any(attention.hook_z.readers for attention in dl.attention.hooked_attentions(model))


def test_positions_count_on_the_canvas_that_a_row_ran_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """`record` runs prompts of another length apart under such a hook; joined, their rows begin after padding."""
    model, prompts = tiny("llada"), [[5, 9, 11, 3], [7, 8], [5, 9, 11, 3, 2, 6, 7], [1, 2]]
    for hooks in ([mask_positions(1)], [ablate("resid", [0, -1]), HOOKS["sinks of the step before"]]):
        recorded = dl.record(model, prompts, REDUCERS, hooks=hooks, **settings("llada", seed=3))
        assert recorded.run.joined_at == (3, 5, 0, 5)
        assert recorded.select(batch=[2, 1]).run.joined_at == (0, 5)
        close(rerun(model, recorded.run, REDUCERS, hooks=hooks), recorded)
        close(rerun(model, recorded.run, REDUCERS, hooks=hooks, rows_per_pass=2), recorded)
        some = rerun(model, recorded.run, REDUCERS, hooks=hooks, rows=[1, 2], steps=[0, 2])
        close(some, recorded.select(batch=[1, 2], step=[0, 2]))
        assert torch.equal(some.run.canvases, recorded.select(batch=[1, 2], step=[0, 2]).run.canvases)
        stored = dl.Recording.load(recorded.save(tmp_path / str(len(hooks))))
        assert stored.run.joined_at == recorded.run.joined_at
        close(rerun(model, stored.run, REDUCERS, hooks=hooks), recorded)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"positions for 4 rows, and another hook names canvas positions"):
        rerun(model, recorded.run, REDUCERS, hooks=[mask_positions(by_row([0], [0], [0], [0])), mask_positions(1)])


def test_positions_that_padding_shifts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """In a run of prompts of several lengths they count from the beginning of the padded canvas."""
    model, hooks = tiny("llada"), [mask_positions(3)]
    padded = dl.denoise(model, PROMPTS, hooks=hooks, **settings("llada"))
    assert padded.joined_at is None
    caplog.clear()
    rerun(model, padded, REDUCERS, hooks=hooks)
    assert "rows of this batch begin at 0 to 6" in caplog.records[-1].getMessage()
    alone = dl.record(model, PROMPTS[:1], REDUCERS, hooks=hooks, **settings("llada", seed=3))
    close(rerun(model, alone.run, REDUCERS, hooks=hooks), alone)


def test_a_recording_says_under_which_hooks_its_arrays_were_computed(tmp_path: Path) -> None:
    model, hooks = tiny("llada"), [HOOKS["positions"]]
    plain = dl.record(model, PROMPTS, REDUCERS, **settings("llada"))
    assert plain.hooks == ()
    hooked = rerun(model, plain.run, REDUCERS, hooks=hooks)
    assert hooked.hooks == ("mask_positions(-4, stage='after')",)
    assert repr(hooked).endswith("under mask_positions(-4, stage='after'))")
    assert "hooks" not in hooked.run.settings
    loaded = dl.Recording.load(hooked.save(tmp_path / "hooked"))
    assert (loaded.hooks, loaded.select(step=2).hooks) == (hooked.hooks, hooked.hooks)
    assert loaded.to_xarray().attrs["hooks"] == json.dumps(list(hooked.hooks))
    own = dl.record(model, PROMPTS, REDUCERS, hooks=hooks, to=tmp_path / "own", **settings("llada"))
    assert own.hooks == hooked.hooks
    without = rerun(model, own.run, REDUCERS)
    assert without.hooks == ()
    assert dl.Recording.load(without.save(tmp_path / "without")).hooks == ()
    with pytest.raises(ValueError, match="recordings differ in hooks"):
        dl.recording.concatenation.joined([plain, hooked])


def test_a_view_under_hooks_is_the_recorded_pattern() -> None:
    from dlm_lens.viz.attention_snapshot import snapshot

    model, hooks = tiny("llada"), [HOOKS["frozen sinks"]]
    recorded = dl.record(model, PROMPTS, [AttentionPattern()], hooks=hooks, **settings("llada"))
    shot = snapshot(model, recorded.run, step=4, layer=1, row=1, hooks=hooks)
    keep = recorded.run.attention_mask[1].nonzero().flatten()
    torch.testing.assert_close(shot.pattern, recorded.pattern[4, 1, 1][:, keep][..., keep], rtol=1e-4, atol=1e-6)
    assert shot.hooks == ("freeze_sinks(TopK(k=2), step=1)",)


def test_addresses_in_the_texts_of_hooks_do_not_part_recordings() -> None:
    model, given = tiny("llada"), settings("llada", seed=3)
    hooks = Doubling(), Doubling()  # both are kept, or the second could lie at the address of the first
    prompts = [5, 9, 11], [6, 2]
    one, two = (
        dl.record(model, prompt, REDUCERS, hooks=[hook], **given)
        for prompt, hook in zip(prompts, hooks, strict=True)
    )
    assert one.hooks != two.hooks
    assert dl.recording.concatenation.joined([one, two]).rows == (0, 0)


@pytest.mark.parametrize("hooks", [5, None, "mask_positions(1)", [["x"], 3]])
def test_hooks_that_are_no_texts_are_refused(hooks: Any, tmp_path: Path) -> None:
    from dlm_lens.files.sealed_json import sealed

    dl.record(tiny("llada"), PROMPTS, REDUCERS, **settings("llada")).save(tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    facts = json.loads(file.read_text())
    facts["settings"]["hooks"] = hooks
    file.write_text(json.dumps(sealed({name: value for name, value in facts.items() if name != "checksum"})))
    with pytest.raises(ValueError, match=r"hooks is .*; it must be a list of texts"):
        dl.Recording.load(tmp_path / "run")


def test_a_run_without_a_step_has_nothing_to_record() -> None:
    with pytest.raises(ValueError, match="the run took no step, so that nothing was recorded"):
        dl.record(tiny("fast_dllm_v2"), PROMPTS, REDUCERS, gen_length=16, reference_quirks=True)
