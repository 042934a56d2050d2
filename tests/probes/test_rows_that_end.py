"""A row whose text ends before those beside it: probes read what they read of the row alone."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.hooks import ablate
from dlm_lens.recording import rerun
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1"]


def pair(family: str, **settings: Any) -> tuple[Any, dl.DenoisingRun, dl.DenoisingRun]:
    """A model whose first row ends early, the run of that row alone, and the run of both rows."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    settings = {"gen_length": 16, "temperature": 0.0, **settings}
    first = dl.denoise(model, PROMPTS, **settings)
    end = int(first.tokens[0, first.prompt_length + 2])
    assert end not in first.tokens[1].tolist()
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return model, dl.denoise(model, PROMPTS[:1], **settings), dl.denoise(model, PROMPTS, **settings)


CASES: dict[str, Any] = {"llada2": {"block_length": 4}, "sdar": {"block_length": 4}, "causal": {}}


@pytest.mark.parametrize("family", CASES)
def test_probes_read_what_they_read_of_the_row_alone(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    assert alone.steps < both.steps
    ends = int(alone.steps)
    assert both.row_steps.tolist() == [ends, both.steps]
    assert alone.row_steps.tolist() == [ends]
    shared = slice(0, alone.tokens.shape[1])
    hook = [ablate("resid", dims=[0])]
    one, two = (probes.replay(model, run, hook, attention=False) for run in (alone, both))
    assert torch.equal(one.predicted[:, 0], two.predicted[:ends, 0, shared])
    assert not bool(two.predicted[ends:, 0].any())
    assert bool(two.predicted[ends:, 1].any())
    torch.testing.assert_close(one.kl[:, 0], two.kl[:ends, 0, shared], rtol=1e-3, atol=1e-5, equal_nan=True)
    lens = dl.logit_lens(model, both)
    assert not bool(((lens.batch == 0) & (lens.step >= ends)).any())
    found = [probes.commitment(model, run) for run in (alone, both)]
    assert torch.equal(found[0].committed_at[0], found[1].committed_at[0, shared])
    assert not bool((found[1].token[ends:, 0] >= 0).any())
    # The other row's predictions are its own, not those of the row that ended.
    right = found[1].token[both.step_of[1].clamp(min=0), 1, torch.arange(both.tokens.shape[1])]
    decided = (both.step_of[1] >= 0) & (right >= 0)
    assert bool(decided.any())
    assert torch.equal(right[decided], both.tokens[1][decided])
    proposed = probes.proposed_commitment(both)
    assert not bool((proposed.token[ends:, 0] >= 0).any())


@pytest.mark.parametrize("family", CASES)
def test_recorded_statistics_are_those_of_the_row_alone(family: str, tmp_path: Path) -> None:
    model, alone, both = pair(family, **CASES[family])
    ends, settings = alone.steps, {"gen_length": 16, "temperature": 0.0, **CASES[family]}
    reducers = [dl.ReceivedAttention(("all", "unmasked"), min_viewers=1), dl.ValueNorm("both"), dl.TopKeys(2)]
    kept = dl.record(model, PROMPTS, reducers, **settings)
    single = dl.record(model, PROMPTS[:1], reducers, **settings)
    stored = dl.record(model, PROMPTS, reducers, to=tmp_path / "a", **settings)
    again = rerun(model, both, reducers)
    keys = single.run.tokens.shape[1]
    for recording in (kept, stored, again):
        assert recording.run.row_steps.tolist() == [ends, both.steps]
        for name, array in single.arrays.items():
            axes, here = single.specs[name].dims, recording.arrays[name]
            others = here[ends:, 0]
            assert bool((others.isnan() if others.is_floating_point() else others == -1).all()), name
            assert not bool((here[ends:, 1].isnan() if here.is_floating_point() else here[ends:, 1] == -1).all())
            here = here[:ends, 0]
            if "key" in axes:
                here = here.narrow(axes.index("key") - 1, 0, keys)  # [step, ...] of one row
            # Another batch: other roundings in float32.
            torch.testing.assert_close(here, array[:, 0], rtol=1e-4, atol=1e-5, equal_nan=True)
    # Both rows were running in these steps; a part does not show where the first one ended.
    part = kept.select(step=slice(ends - 2, both.steps))
    assert part.run.row_steps.tolist() == [2, both.steps - ends + 2]
    assert stored.select(step=slice(ends - 2, both.steps)).received[2:, 0].isnan().all()
    assert kept.select(step=slice(ends, both.steps)).run.row_steps[0] == 0


@pytest.mark.parametrize("family", CASES)
def test_sinks_and_their_lifetimes_end_with_their_row(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    rule = dl.TopK(1)
    one, two = (dl.received_over_steps(model, run, min_viewers=1) for run in (alone, both))
    ends, sinks = alone.steps, dl.find_sinks(two, rule)
    assert not bool(sinks.is_sink[ends:, 0].any())
    assert bool(sinks.is_sink[ends:, 1].any(-1).all())
    assert two.counted[ends:, 0].eq(0).all()
    lives, beside = (dl.trajectories(received, rule).table() for received in (one, two))
    beside = beside[beside["batch"] == 0].reset_index(drop=True)
    names = ["layer", "head", "position", "first_step", "last_step", "died"]
    pd.testing.assert_frame_equal(beside[names], lives[names], check_dtype=False)


@pytest.mark.parametrize("family", CASES)
def test_replayed_sinks_are_those_of_the_row_alone(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    hook = [ablate("resid", dims=[0])]
    one, two = (probes.replay(model, run, hook) for run in (alone, both))
    ends, keys = alone.steps, slice(0, alone.tokens.shape[1])
    for name in ("received", "received_hooked"):
        single, beside = getattr(one, name), getattr(two, name)
        assert bool(beside.values[ends:, 0].isnan().all())
        assert bool((~beside.values[ends:, 1].isnan()).any())
        assert not bool(beside.counted[ends:, 0].any())
        # Another batch: other roundings in float32.
        torch.testing.assert_close(
            beside.values[:ends, 0][..., keys], single.values[:, 0], rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_a_row_without_an_end_is_over_with_the_run() -> None:
    run = dl.denoise(tiny("llada"), PROMPTS, steps=4, gen_length=8)
    assert run.row_steps.tolist() == [4, 4]
    joined = dl.record(tiny("causal"), PROMPTS, gen_length=5, batch_size=1).run
    assert joined.row_steps.tolist() == [5, 5]
