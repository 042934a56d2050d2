"""A row whose text ends before those beside it: what is recorded of it is what is recorded of it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import KeyNorm, ReceivedAttention, Recording, RegionMass, rerun
from dlm_lens.sinks import (
    AboveMean,
    key_statistic_over_steps,
    position_or_token,
    received_over_steps,
    trajectories,
)
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1"]
REDUCERS = [ReceivedAttention(min_viewers=1), RegionMass(), KeyNorm()]
CASES: dict[str, dict[str, Any]] = {
    "causal": {"gen_length": 12},
    "sdar": {"gen_length": 16, "block_length": 4, "remasking": "sequential", "temperature": 0.0},
    "nemotron_labs_diffusion": {"gen_length": 16, "block_length": 4, "parallel": False},
    "efficient_dlm": {"gen_length": 16, "block_length": 4, "parallel": False, "temperature": 0.0},
    "stable_diffcoder": {"gen_length": 16, "parallel": False},
    "sdlm": {"gen_length": 16, "threshold": 1.0},
    "wedlm": {"gen_length": 12, "window_length": 4, "entropy_threshold": 0.0, "temperature": 0.0},
    "mmada": {"steps": 12, "gen_length": 12, "block_length": 4},
}


def model_and_settings(family: str) -> tuple[Any, dict[str, Any]]:
    """A model whose first prompt is answered by a shorter text than the second."""
    model, settings = tiny(family), dict(CASES[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    run = dl.denoise(model, PROMPTS, **settings)
    first, second = run.tokens[:, run.prompt_length :].tolist()
    if family == "mmada":  # a block's last token
        return model, {**settings, "eot_token": first[3]}
    end = next(token for token in first[1:] if token not in second)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return model, settings


def recorded(how: str, path: Path, model: Any, settings: dict[str, Any]) -> Recording:
    """Both rows in one batch."""
    if how == "rerun":
        return rerun(model, dl.denoise(model, PROMPTS, **settings), REDUCERS)
    if how == "rerun by rows":
        return rerun(model, dl.denoise(model, PROMPTS, **settings), REDUCERS, rows_per_pass=1)
    if how == "saved":
        return Recording.load(dl.record(model, PROMPTS, REDUCERS, **settings).save(path))
    return dl.record(model, PROMPTS, REDUCERS, to=path if how == "to" else None, **settings)


@pytest.mark.parametrize("how", ["memory", "to", "saved", "rerun", "rerun by rows"])
@pytest.mark.parametrize("family", CASES)
def test_nothing_is_defined_after_the_end_of_a_row(family: str, how: str, tmp_path: Path) -> None:
    model, settings = model_and_settings(family)
    alone = dl.record(model, PROMPTS[:1], REDUCERS, **settings)
    both = recorded(how, tmp_path / "both", model, settings)
    end = int(alone.run.row_steps[0])
    assert both.run.row_steps.tolist() == [end, both.run.steps]
    assert end < both.run.steps
    part = both.select(step=slice(end - 1, end + 2))
    for name in both.specs:
        own, whole = getattr(alone, name)[:end, 0], getattr(both, name)
        if "key" in both.specs[name].dims:
            whole = whole[..., : own.shape[-1]]
        # The same numbers from a batch of another size.
        torch.testing.assert_close(whole[:end, 0], own, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert bool(whole[end:, 0].isnan().all())
        assert not bool(whole[end:, 1].isnan().flatten(1).all(-1).any())
        assert getattr(part, name)[:, 0].isnan().flatten(1).all(-1).tolist() == [False, True, True]
    assert not bool(both.facts.keys[end:, 0].any())


@pytest.mark.parametrize("family", CASES)
def test_sinks_of_a_row_do_not_depend_on_when_the_others_end(family: str) -> None:
    model, settings = model_and_settings(family)
    alone, both = (dl.denoise(model, prompts, **settings) for prompts in (PROMPTS[:1], PROMPTS))
    columns = ["with_sink", "sinks", "lives", "moves", "life", "static_share", "moved_over_run"]
    tables = [
        trajectories(received_over_steps(model, run, min_viewers=1), AboveMean(1.0)).measures.query("batch == 0")
        for run in (alone, both)
    ]
    one, two = (table[columns].to_numpy(dtype=float) for table in tables)
    assert two == pytest.approx(one, nan_ok=True)
    assert bool((tables[0]["lives"] > 0).any())
    norms = key_statistic_over_steps(model, both, "key norm").values
    assert bool(norms[int(both.row_steps[0]) :, 0].isnan().all())


def test_a_part_does_not_begin_after_the_end_of_a_row_and_go_on_before_it() -> None:
    model, settings = model_and_settings("causal")
    recording = dl.record(model, PROMPTS, REDUCERS, **settings)
    end = int(recording.run.row_steps[0])
    with pytest.raises(ValueError, match=f"row 0 was over after {end} steps"):
        recording.select(step=[end, end - 1])
    assert recording.select(step=[end, end - 1], batch=1).run.row_steps.tolist() == [2]
    assert recording.select(step=[end - 1, end]).run.row_steps.tolist() == [1, 2]
    assert recording.select(step=[end - 1, end - 2]).run.row_steps.tolist() == [2, 2]


def test_a_run_that_ends_with_all_its_rows_is_the_same() -> None:
    run = dl.denoise(tiny("llada"), PROMPTS, steps=4, gen_length=8)
    assert run.running.all()
    assert dl.record(tiny("llada"), PROMPTS, [KeyNorm()], steps=4, gen_length=8).run.rows_ran is None


def test_a_row_that_has_ended_has_no_trials_of_positions_and_tokens() -> None:
    model, settings = model_and_settings("causal")
    run = dl.denoise(model, PROMPTS, **settings)
    found = position_or_token(model, run, AboveMean(0.5), steps=[0, 1, -1], min_viewers=1).table()
    ends = run.row_steps.tolist()
    assert ends[0] < ends[1]
    assert all(step < ends[row] for step, row in zip(found["step"], found["batch"], strict=True))
    assert set(found["batch"]) == {0, 1}
    assert int(found["step"].max()) == run.steps - 1
