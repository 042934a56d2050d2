"""The progress that hooks and steps of a trace see is the run's: in blocks, after the last mask, and in AR runs."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import at_progress
from dlm_lens.testing import tiny

IDS = [[1, 2, 3, 4], [5, 9]]
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llada": ("llada", {}, {"steps": 6, "gen_length": 6, "block_length": 3}),
    "guided": ("llada", {}, {"steps": 4, "gen_length": 4, "cfg_scale": 1.0}),
    "bd3lm": ("bd3lm", {}, {"steps": 8, "gen_length": 8, "block_length": 4}),
    "sdar": ("sdar", {}, {"gen_length": 8, "block_length": 4}),
    "rows that end apart": ("llada2", {}, {"gen_length": 5, "block_length": 4, "threshold": 0.3}),
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
