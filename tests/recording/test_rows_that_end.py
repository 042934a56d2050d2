"""A row whose text ends before those beside it: what is recorded of it is what is recorded of it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import KeyNorm, ReceivedAttention, Recording, RegionMass, rerun
from dlm_lens.sampling import Comparison
from dlm_lens.sinks import (
    AboveMean,
    key_statistic_over_steps,
    position_or_token,
    received_over_steps,
    trajectories,
)
from dlm_lens.testing import tiny
from tests.sampling.interrupted import resumed_as_unbroken

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1"]
REDUCERS = [ReceivedAttention(min_viewers=1), RegionMass(), KeyNorm()]
CASES: dict[str, dict[str, Any]] = {
    "causal": {"gen_length": 12},
    "sdar": {"gen_length": 16, "block_length": 4, "remasking": "sequential", "temperature": 0.0},
    "nemotron_labs_diffusion": {"gen_length": 16, "block_length": 4, "parallel": False},
    "efficient_dlm": {"gen_length": 16, "block_length": 4, "parallel": False, "temperature": 0.0},
    "stable_diffcoder": {"gen_length": 16, "parallel": False},
    "sdlm": {"gen_length": 16, "threshold": 1.0},
    "i_dlm": {"gen_length": 16, "temperature": 0.0},
    "wedlm": {"gen_length": 12, "window_length": 4, "entropy_threshold": 0.0, "temperature": 0.0},
    "mmada": {"steps": 12, "gen_length": 12, "block_length": 4},
}
FULL: dict[str, dict[str, Any]] = {
    "llada": {"steps": 12, "gen_length": 12, "threshold": 0.5},
    "fast_dllm_v2": {"gen_length": 12, "threshold": 0.5},
    "nemotron_labs_diffusion": {"gen_length": 12, "block_length": 12, "threshold": 0.5},
    "efficient_dlm": {"gen_length": 12, "block_length": 12, "threshold": 0.5},
    "sdlm": {"gen_length": 12, "threshold": 0.5},
    "i_dlm": {"gen_length": 12},
}
"""Settings under which one row has its answer in fewer steps than the other, without an end of text."""
ENDS = [*((family, "text") for family in CASES), *((family, "full") for family in FULL)]


def model_and_settings(family: str, end: str = "text") -> tuple[Any, dict[str, Any], list[str]]:
    """A model, and prompts of which the first is answered by a shorter text than the second, or in fewer steps."""
    model, settings = tiny(family), dict(CASES[family] if end == "text" else FULL[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    if end == "full":
        model.get_output_embeddings().weight.data.mul_(8.0)
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        steps = [dl.denoise(model, prompt, **settings).steps for prompt in PROMPTS]
        assert steps[0] != steps[1]
        return model, settings, PROMPTS if steps[0] < steps[1] else PROMPTS[::-1]
    run = dl.denoise(model, PROMPTS, **settings)
    first, second = run.tokens[:, run.prompt_length :].tolist()
    if family == "mmada":  # a block's last token
        return model, {**settings, "eot_token": first[3]}, PROMPTS
    stop = next(token for token in first[1:] if token not in second)
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    return model, settings, PROMPTS


def recorded(how: str, path: Path, model: Any, prompts: list[str], settings: dict[str, Any]) -> Recording:
    """Both rows in one batch."""
    if how == "rerun":
        return rerun(model, dl.denoise(model, prompts, **settings), REDUCERS)
    if how == "rerun by rows":
        return rerun(model, dl.denoise(model, prompts, **settings), REDUCERS, rows_per_pass=1)
    if how == "saved":
        return Recording.load(dl.record(model, prompts, REDUCERS, **settings).save(path))
    return dl.record(model, prompts, REDUCERS, to=path if how == "to" else None, **settings)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "how",
    ["memory", *(pytest.param(how, marks=pytest.mark.long) for how in ("to", "saved", "rerun", "rerun by rows"))],
)
@pytest.mark.parametrize(("family", "end"), ENDS)
def test_nothing_is_defined_after_the_end_of_a_row(family: str, end: str, how: str, tmp_path: Path) -> None:
    model, settings, prompts = model_and_settings(family, end)
    alone = dl.record(model, prompts[:1], REDUCERS, **settings)
    both = recorded(how, tmp_path / "both", model, prompts, settings)
    last = int(alone.run.row_steps[0])
    assert both.run.row_steps.tolist() == [last, both.run.steps]
    assert last < both.run.steps
    part = both.select(step=slice(last - 1, last + 2))
    for name in both.specs:
        own, whole = getattr(alone, name)[:last, 0], getattr(both, name)
        if "key" in both.specs[name].dims:
            whole = whole[..., : own.shape[-1]]
        # The same numbers from a batch of another size.
        torch.testing.assert_close(whole[:last, 0], own, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert bool(whole[last:, 0].isnan().all())
        assert not bool(whole[last:, 1].isnan().flatten(1).all(-1).any())
        ended = [False, True, True][: len(part.steps)]
        assert getattr(part, name)[:, 0].isnan().flatten(1).all(-1).tolist() == ended
    assert not bool(both.facts.keys[last:, 0].any())


@pytest.mark.parametrize(("family", "end"), ENDS)
def test_sinks_of_a_row_do_not_depend_on_when_the_others_end(family: str, end: str) -> None:
    model, settings, prompts = model_and_settings(family, end)
    alone, both = (dl.denoise(model, batch, **settings) for batch in (prompts[:1], prompts))
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


@pytest.mark.parametrize("family", FULL)
def test_a_resumed_run_knows_which_rows_were_over(family: str, tmp_path: Path) -> None:
    model, settings, prompts = model_and_settings(family, "full")
    whole = resumed_as_unbroken(model, prompts, tmp_path / "run", passes=2, **settings)
    assert whole.run.rows_ran is not None


def test_a_row_with_nothing_to_write_has_the_first_step(tmp_path: Path) -> None:
    model = tiny("llada")
    mask = model.config.mask_token_id
    prompts = [[5, 6, 7, mask, mask, 8], [5, 6, 7, 9, 10, 8]]
    both = dl.record(model, prompts, REDUCERS, gen_length=0, block_length=6, threshold=0.5, steps=4)
    assert both.run.row_steps.tolist() == [2, 1]
    assert dl.find_sinks(both, "top-k:1").is_sink.any(-1).any(-1).any(-1).tolist() == [[True, True], [True, False]]
    for row in (0, 1):
        dl.viz.report(both, tmp_path / f"{row}.html", row=row)


def test_a_run_beside_a_longer_one_keeps_the_end_of_its_rows() -> None:
    model, settings, prompts = model_and_settings("llada", "full")
    short, long = (dl.denoise(model, prompts, **{**settings, "threshold": each}) for each in (0.5, None))
    held, other = Comparison(short, long, ())._pair
    assert held.row_steps.tolist() == [short.rows_ran[0], long.steps]
    assert other.row_steps.tolist() == [long.steps] * 2


def test_a_part_does_not_begin_after_the_end_of_a_row_and_go_on_before_it() -> None:
    model, settings, _ = model_and_settings("causal")
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
    model, settings, _ = model_and_settings("causal")
    run = dl.denoise(model, PROMPTS, **settings)
    found = position_or_token(model, run, AboveMean(0.5), steps=[0, 1, -1], min_viewers=1).table()
    ends = run.row_steps.tolist()
    assert ends[0] < ends[1]
    assert all(step < ends[row] for step, row in zip(found["step"], found["batch"], strict=True))
    assert set(found["batch"]) == {0, 1}
    assert int(found["step"].max()) == run.steps - 1
