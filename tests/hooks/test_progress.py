"""The progress that hooks and steps of a trace see is the run's: in blocks, after the last mask, and in AR runs."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import at_progress, hooks_of_run, mask_positions, steer
from dlm_lens.probes.clock.states import QUANTITIES, labels_of, quantities_of
from dlm_lens.testing import tiny

IDS = [[1, 2, 3, 4], [5, 9]]
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llada": ("llada", {}, {"steps": 6, "gen_length": 6, "block_length": 3}),
    "guided": ("llada", {}, {"steps": 4, "gen_length": 4, "cfg_scale": 1.0}),
    "bd3lm": ("bd3lm", {}, {"steps": 8, "gen_length": 8, "block_length": 4}),
    "sdar": ("sdar", {}, {"gen_length": 8, "block_length": 4}),
    "rows that end apart": ("llada2", {}, {"gen_length": 5, "block_length": 4, "threshold": 0.3}),
    "deleting and inserting": (
        "llada2",
        {"expert_capacity": 4, "block_size": 4, "delete_token_id": 14, "split_token_id": 61},
        {"gen_length": 4, "threshold": 0.1, "max_post_steps": 3},
    ),
    "editing": (
        "llada2",
        {"sampler": "llada2_editing"},
        {"gen_length": 4, "block_length": 4, "threshold": 0.3, "editing_threshold": 0.1, "max_post_steps": 3},
    ),
}


class See:
    """Notes the progress in the first layer, and changes nothing."""

    site = "z"

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        self.seen.setdefault(hook.step, hook.run.progress)
        return tensor


@pytest.mark.parametrize("name", RUNS)
def test_hooks_see_the_progress_of_the_run(name: str) -> None:
    family, config, settings = RUNS[name]
    model, hook, late = tiny(family, **config), See(), See()
    run = dl.denoise(model, IDS, hooks=[hook, at_progress(late, (0.5, 1))], **settings)
    assert sorted(hook.seen) == list(range(run.steps))
    for step, progress in hook.seen.items():
        wanted = run.progress[step].repeat(len(progress) // len(IDS))  # both halves under guidance
        torch.testing.assert_close(progress, wanted, rtol=0, atol=0)
    assert sorted(late.seen) == [step for step in range(run.steps) if bool((run.progress[step] >= 0.5).any())]


def test_scheduled_weights_are_those_of_each_row() -> None:
    family, config, settings = RUNS["rows that end apart"]
    model, vector = tiny(family, **config), torch.randn(32, generator=torch.Generator().manual_seed(0))
    hook = steer(vector, schedule=(0.0, 3.0))
    together = dl.denoise(model, IDS, hooks=[hook], **settings)
    assert not together.progress[:, 0].equal(together.progress[:, 1])
    for row, ids in enumerate(IDS):
        alone = dl.denoise(model, [ids], hooks=[hook], **settings)
        assert alone.answers == [together.answers[row]]
        own = together.confidence[:, row][together.unmasked[:, row]]
        torch.testing.assert_close(own, alone.confidence[alone.unmasked], atol=1e-5, rtol=1e-4)


def test_progress_of_an_ar_run_is_that_of_its_steps() -> None:
    hook = See()
    run = dl.denoise(tiny("causal"), IDS, hooks=[hook], gen_length=4)
    assert {step: seen.tolist() for step, seen in hook.seen.items()} == {
        step: [step / run.steps] * 2 for step in range(run.steps)
    }


@pytest.mark.parametrize("name", [*RUNS, "ar"])
def test_steps_of_a_trace_have_the_progress_that_applied_hooks_see(name: str) -> None:
    family, config, settings = RUNS.get(name, ("causal", {}, {"gen_length": 4, "use_cache": False}))
    lm, hook = dl.DiffusionLM(tiny(family, **config)), See()
    with lm.generate(IDS, **settings) as tracer:
        steps = {}.save()
        for step in tracer.steps[:]:
            steps[step.index] = step.progress.clone()
            lm.layers[0].attn.apply(hook, step)
        run = tracer.result.save()
    assert sorted(steps) == list(range(run.steps))
    for step, progress in steps.items():
        wanted = torch.full((2,), step / run.steps) if name == "ar" else run.progress[step]
        torch.testing.assert_close(progress, wanted, rtol=0, atol=0)
        torch.testing.assert_close(hook.seen[step][: len(IDS)], wanted, rtol=0, atol=0)


def test_a_trace_that_decides_everything_has_a_progress_of_one() -> None:
    lm = dl.DiffusionLM(tiny("llada"))
    with lm.generate([[1, 2, 3, 4]], steps=8, gen_length=8) as tracer:
        seen = [].save()
        for step in tracer.steps[:]:
            seen.append(float(step.progress))
            if step.index == 0:
                lm.sampler.unmasked = step.masked
    assert seen == [0.0, *[1.0] * 7]


PROMPTS = [[5, 9, 13, 2, 7, 30, 31], [3, 8, 1, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
ENDS_EARLY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fast_dllm_v2": ("fast_dllm_v2", {"eos_token_id": 35}, {"block_length": 4, "threshold": 0.3}),
    "dllm_blocks": ("a2d_qwen3", {"sampler": "dllm_blocks", "eos_token_id": 8}, {"block_length": 4, "steps": 24}),
    "diffusion_gemma": (
        "diffusion_gemma",
        {"eos_token_id": [3, 50, 20, 33, 8]},
        {
            "steps_per_block": 5,
            "seed": 3,
            "entropy_bound": 3.0,
            "t_min": 0.9,
            "t_max": 1.6,
            "stability_threshold": 0,
            "confidence_threshold": 3.8,
        },
    ),
}
"""Samplers whose canvas ends with the last row's text, and runs whose last row ends before others."""


def ending_early(name: str) -> tuple[Any, dict[str, Any]]:
    """A model, and the settings of runs that end early."""
    family, config, settings = ENDS_EARLY[name]
    model = tiny(family, **config).double()
    if name == "diffusion_gemma":
        model.set_experts_implementation("eager")
    return model, {"gen_length": 24, **settings}


@pytest.mark.parametrize("name", ENDS_EARLY)
def test_a_run_that_ended_early_has_the_progress_of_its_row_in_a_batch(name: str) -> None:
    model, settings = ending_early(name)
    batch = dl.denoise(model, PROMPTS, **settings)
    row, hook = min(range(3), key=lambda i: int(batch.row_steps[i])), See()
    run = dl.denoise(model, PROMPTS[row : row + 1], hooks=[hook], **settings)
    assert int(run.masked[0].sum()) < 24  # the canvas ends before the answer that was planned
    wanted = batch.progress[: run.steps, row]
    torch.testing.assert_close(torch.cat([hook.seen[step] for step in range(run.steps)]), wanted, rtol=0, atol=0)
    torch.testing.assert_close(run.progress[:-1, 0], wanted, rtol=0, atol=0)
    torch.testing.assert_close(run.progress[-1, 0], batch.progress[run.steps, row], rtol=0, atol=0)
    assert run.first_steps(2).progress.equal(run.progress[:3])  # whose last canvas is in the middle of the run
    for target in ("time", "progress"):
        torch.testing.assert_close(labels_of(run, target)[:, 0], labels_of(batch, target)[: run.steps, row])
    for number in range(len(QUANTITIES) - 1):  # the last one is a share of the canvas, padding of prompts apart
        torch.testing.assert_close(quantities_of(run)[number, :, 0], quantities_of(batch)[number, : run.steps, row])


@pytest.mark.parametrize("name", ENDS_EARLY)
def test_reruns_see_the_progress_of_a_run_that_ended_early(name: str) -> None:
    model, settings = ending_early(name)
    batch = dl.denoise(model, PROMPTS, **settings)
    row, live, again = min(range(3), key=lambda i: int(batch.row_steps[i])), See(), See()
    run = dl.denoise(model, PROMPTS[row : row + 1], hooks=[live], **settings)
    dl.replay(model, run, [again])
    assert sorted(again.seen) == sorted(live.seen)
    for step, progress in live.seen.items():
        torch.testing.assert_close(again.seen[step], progress, rtol=0, atol=0)


def test_rows_have_the_answer_that_their_batch_planned() -> None:
    # The original of Fast-dLLM v2 continues every prompt up to the length that the longest one gets.
    model, live, again = tiny("fast_dllm_v2").double(), See(), See()
    run = dl.denoise(model, PROMPTS, hooks=[live], gen_length=8, block_length=4, reference_quirks=True)
    assert run.masked[0].sum(-1).tolist() == [8, 8, 9]  # and this run ends before
    dl.replay(model, run, [again])
    for step, progress in live.seen.items():
        assert progress.tolist() == run.progress[step].tolist() == again.seen[step].tolist()
    planned = torch.tensor([13, 13, 14])  # 22 positions, and a prompt's last token that is written over
    torch.testing.assert_close(run.progress[2], torch.tensor([1, 1, 2]) / planned)


@pytest.mark.parametrize("order", [1, -1])
def test_joined_rows_have_the_answer_that_each_planned_alone(order: int) -> None:
    model = tiny("fast_dllm_v2", eos_token_id=35).double()
    prompts = [[5, 9, 13, 2, 7, 30, 31], [*range(11, 22)]][::order]  # one batch would continue both to 44 positions
    settings = {"gen_length": 24, "block_length": 4, "threshold": 1.0, "reference_quirks": True}
    joined = dl.record(model, prompts, [dl.ReceivedAttention(min_viewers=1)], batch_size=1, **settings).run
    for row, prompt in enumerate(prompts):
        hook = See()
        run = dl.denoise(model, [prompt], hooks=[hook], **settings)
        seen = torch.cat([hook.seen[step] for step in range(run.steps)])
        torch.testing.assert_close(joined.progress[: run.steps, row], seen, rtol=0, atol=0)


def test_a_rerun_under_at_progress_is_the_recording_of_a_run_that_ended_early() -> None:
    model, settings = ending_early("diffusion_gemma")
    hooks = [at_progress(mask_positions(1), (0.1, 0.5))]
    clean = dl.denoise(model, PROMPTS[2:], **settings)
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    recording = dl.record(model, PROMPTS[2:], reducers, hooks=hooks, **settings)
    assert recording.run.canvases.equal(clean.canvases)  # 1 of 24 positions is decided: the hook never acts
    assert float(dl.replay(model, clean, hooks).kl.nan_to_num().abs().max()) == 0
    again = dl.rerun(model, recording.run, reducers, hooks=hooks_of_run(recording.run))
    for array, wanted in zip(again.arrays.values(), recording.arrays.values(), strict=True):
        torch.testing.assert_close(array, wanted, equal_nan=True)


@pytest.mark.parametrize(("name", "rows"), [("dllm_blocks", [0, 1, 2]), ("diffusion_gemma", [0, 2])])
def test_joined_rows_and_parts_keep_the_progress_of_runs_that_ended_early(name: str, rows: list[int]) -> None:
    model, settings = ending_early(name)
    reducers, prompts = [dl.ReceivedAttention(min_viewers=1)], [PROMPTS[row] for row in rows]
    alone = [dl.denoise(model, [prompt], **settings) for prompt in prompts]
    assert len({run.masked.shape[-1] - run.prompt_length for run in alone}) > 1  # canvases of unequal length
    joined = dl.record(model, prompts, reducers, batch_size=1, **settings)
    batch = dl.denoise(model, PROMPTS, **settings)
    for row, run in enumerate(alone):
        wanted = batch.progress[: run.steps, rows[row]]
        torch.testing.assert_close(joined.run.progress[: run.steps, row], wanted, rtol=0, atol=0)
        part = joined.select(step=[1, 2], batch=[row])
        torch.testing.assert_close(part.run.progress[:-1, 0], wanted[1:3], rtol=0, atol=0)
