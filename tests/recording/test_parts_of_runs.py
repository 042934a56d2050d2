"""A part of a run (`Recording.select`) keeps its place: passes over its canvases are those of the whole run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_progress, at_steps, capture, freeze_sinks, mask_top_sinks
from dlm_lens.recording import ReceivedAttention, Recording, UpdateNorm, rerun
from dlm_lens.sampling import StoredRun
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS, settings

REDUCERS = [ReceivedAttention(min_viewers=1), UpdateNorm()]


def same(found: Recording, wanted: Recording) -> None:
    assert found.steps == wanted.steps
    for name in ("received", "update_norm"):
        # Equal passes over equal canvases; which rows share a pass changes nothing here.
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("steps", [[5], [4, 2], slice(1, None, 2)])
@pytest.mark.parametrize("family", ["llada", "dream", "diffugpt", "mdlm", "mdlm, given the noise", "sedd", "duo"])
def test_the_steps_of_a_part_are_computed_as_in_the_run(family: str, steps: Any) -> None:
    name, _, conditioned = family.partition(", ")
    model = tiny(name, time_conditioning=True) if conditioned else tiny(name)
    dit = name in ("mdlm", "sedd", "duo")
    given = {"gen_length": 12, "steps": 8, "seed": [3, 4]} if dit else settings(name)
    recorded = dl.record(model, PROMPTS, REDUCERS, **given)
    part = recorded.select(step=steps)
    assert (
        part.run.step_numbers
        == part.steps
        == tuple(range(recorded.run.steps)[steps] if isinstance(steps, slice) else steps)
    )
    same(rerun(model, part.run, REDUCERS), part)


def test_the_network_of_a_step_depends_on_its_number_where_it_is_given_the_noise() -> None:
    """Else the test above could not fail: the same canvas at another step has other updates."""
    model = tiny("mdlm", time_conditioning=True)
    run = dl.denoise(model, PROMPTS, gen_length=12, steps=8, seed=[3, 4])
    part = rerun(model, run, REDUCERS, steps=[5]).run
    assert part.part is not None
    early = replace(part, part=replace(part.part, numbers=(0,)))
    assert not torch.allclose(rerun(model, early, REDUCERS).update_norm, rerun(model, part, REDUCERS).update_norm)


def test_guidance_masks_the_prompt_alone() -> None:
    model = tiny("llada")
    recorded = dl.record(model, PROMPTS, REDUCERS, cfg_scale=1.5, **settings("llada"))
    part = recorded.select(step=[4]).run
    assert not torch.equal(part.masked[0], part.answer)
    assert torch.equal(part.answer, recorded.run.masked[0])
    whole, alone = StoredRun(model, recorded.run), StoredRun(model, part)
    with torch.no_grad():
        torch.testing.assert_close(
            alone.logits(alone.states(0)), whole.logits(whole.states(4)), rtol=1e-5, atol=1e-6
        )
    assert torch.equal(part.progress[0], recorded.run.progress[4])


@pytest.mark.parametrize(
    "hook",
    [
        at_steps(ablate("mlp_out", None, "zero"), [1, 5]),
        at_steps(ablate("mlp_out", None, "zero"), [-1]),
        at_progress(ablate("mlp_out", None, "zero"), (0.5, 1.0)),
    ],
    ids=["steps", "the last step", "progress"],
)
def test_hooks_count_the_steps_of_the_whole_run(hook: Any) -> None:
    model = tiny("llada")
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=[hook], **settings("llada"))
    plain = rerun(model, recorded.run, REDUCERS)
    part = recorded.select(step=[0, 1, 4, 5])
    same(rerun(model, part.run, REDUCERS, hooks=[hook]), part)
    assert not torch.equal(recorded.update_norm[5], plain.update_norm[5])


@pytest.mark.parametrize("hook", [freeze_sinks(dl.TopK(2), step=1), mask_top_sinks(1, source="previous")])
def test_a_hook_that_depends_on_missing_steps_is_refused(hook: Any) -> None:
    model = tiny("llada")
    recorded = dl.record(model, PROMPTS, REDUCERS, hooks=[hook], **settings("llada"))
    first = recorded.select(step=slice(0, 4))
    same(rerun(model, first.run, REDUCERS, hooks=[hook]), first)
    with pytest.raises(ValueError, match=r"depends on earlier steps.*before step 3; give the whole run"):
        rerun(model, recorded.select(step=[0, 3]).run, REDUCERS, hooks=[hook])


def test_keys_in_a_cache_come_from_the_step_that_left_them() -> None:
    model = tiny("llada")
    given: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "cache": "dual", "seed": [3, 4]}
    recorded = dl.record(model, PROMPTS, REDUCERS, **given)
    whole = [step for step, span in enumerate(recorded.run.computed) if span is None]
    assert len(whole) > 1
    block = recorded.select(step=slice(whole[1], whole[1] + 3))
    same(rerun(model, block.run, REDUCERS), block)
    # Step 0 left keys too, but those that this step reads are of the pass that began its block.
    with pytest.raises(ValueError, match=rf"step {whole[1] + 1} attends to keys of an earlier step"):
        rerun(model, recorded.select(step=[0, whole[1] + 1]).run, REDUCERS)


def test_conditioning_logits_come_from_the_step_before() -> None:
    model = tiny("diffusion_gemma")
    recorded = dl.record(model, PROMPTS, REDUCERS, gen_length=12, seed=[3, 4])
    second = recorded.run.blocks.index(1)
    part = recorded.select(step=slice(second, second + 3))
    assert part.run.block_numbers == (0, 1, 2)
    same(rerun(model, part.run, REDUCERS), part)
    with pytest.raises(ValueError, match=rf"step {second + 1} is conditioned on the logits of step {second}"):
        rerun(model, recorded.select(step=[0, second + 1]).run, REDUCERS)


def test_captured_activations_have_the_numbers_of_the_whole_run() -> None:
    model = tiny("llada")
    recorded = dl.record(model, PROMPTS, REDUCERS, **settings("llada"))
    part, whole = recorded.select(step=[2, 5]).run, capture(model, recorded.run, "resid")
    for steps, numbers in ((None, (2, 5)), ([-1], (5,))):
        found = capture(model, part, "resid", cache_steps=steps)
        assert found.steps == numbers
        assert all(torch.equal(found["resid", 1, number], whole["resid", 1, number]) for number in numbers)


def test_a_part_of_a_part_and_one_from_the_disk_keep_their_place(tmp_path: Path) -> None:
    model = tiny("llada")
    recorded = dl.record(model, PROMPTS, REDUCERS, block_length=4, **settings("llada"))
    twice = recorded.select(step=slice(1, None)).select(step=[1, 3], batch=[1])
    stored = Recording.load(twice.save(tmp_path / "part"))
    for one in (twice, stored, stored.select(batch=[0])):
        assert one.run.step_numbers == one.steps == (2, 4)
        assert one.run.block_numbers == tuple(recorded.run.block_numbers[step] for step in (2, 4))
        assert torch.equal(one.run.answer, recorded.run.masked[0][[1]])
        assert one.run.planned == recorded.run.steps
        same(rerun(model, one.run, REDUCERS), one)
    assert twice.run.first_steps(1).step_numbers == (2,)
    everything = recorded.select(step=slice(None))
    assert everything.run.part is None
