"""Loops over steps one after the other, inside one another, and over none of the run's steps."""

from typing import Any

import pytest
from nnsight.intervention.interleaver import OutOfOrderError

import dlm_lens as dl
from dlm_lens.testing import tiny

IDS = [5, 9, 14]
RUN = {"steps": 8, "gen_length": 8, "block_length": 4}


@pytest.fixture(scope="module")
def lm() -> dl.DiffusionLM:
    return dl.DiffusionLM(tiny("llada"))


@pytest.mark.parametrize("first", [slice(None), -1])
@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (2, OutOfOrderError, "requests step 2, but the run is over.*ended in step 7"),
        (-2, OutOfOrderError, "requests step 6, but the run is over"),
        ([3, 5], OutOfOrderError, "requests step 3, but the run is over"),
        (slice(1, 3), OutOfOrderError, "requests step 1, but the run is over"),
        (99, IndexError, "step 99 does not exist: this run has 8 steps"),
    ],
    ids=str,
)
def test_a_loop_after_the_last_step_does_not_pass_in_silence(
    lm: Any, first: Any, key: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[first]:
            lm.canvas.sum()
        for step in tracer.steps[key]:
            lm.canvas.sum()


@pytest.mark.parametrize("key", [slice(None), slice(8, None), slice(9, 20)], ids=str)
def test_the_steps_that_remain_after_the_last_one_are_none(lm: Any, key: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps:
            seen.append(int(step))
        for step in tracer.steps[key]:
            seen.append(int(step))
        run = tracer.result.save()
    assert seen == list(range(8))
    assert run.steps == 8


@pytest.mark.parametrize(("key", "shown"), [(slice(10, 20), "10:20"), ([], "[]"), (slice(9, None, 2), "9::2")])
def test_a_loop_over_none_of_the_steps_warns(
    lm: Any, caplog: pytest.LogCaptureFixture, key: Any, shown: str
) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[key]:
            lm.canvas.sum()
    assert f"tracer.steps[{shown}] visits no step: the run has steps 0 to 7" in caplog.text


def test_a_loop_inside_a_loop_that_leaves_steps_out_is_refused(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="body of step 0 holds a loop over steps that went on to step 2"):
        with lm.generate(IDS, **RUN) as tracer:
            for step in tracer.steps[:2]:
                for later in tracer.steps[1:3]:
                    lm.canvas.sum()


def test_a_loop_inside_a_loop_that_is_left_goes_on(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps[2:]:
            for later in tracer.steps[4:6]:
                seen.append(int(later))
            break
    assert seen == [4, 5]


def test_a_condition_of_every_row_is_refused(lm: Any) -> None:
    with pytest.raises(ValueError, match=r"returned a tensor of shape \[2\].*return one truth value"):
        with lm.generate([IDS, IDS], **RUN) as tracer:
            for step in tracer.steps.where(lambda s: s.progress >= 0.5):
                lm.canvas.sum()


@pytest.mark.parametrize("prompt", [IDS, None], ids=["beside a prompt", "in another invoke"])
def test_an_invoke_in_a_running_trace_is_refused(lm: Any, prompt: Any) -> None:
    given = () if prompt is None else (prompt,)
    with pytest.raises(ValueError, match="the model is already running"), lm.generate(*given, **RUN) as tracer:
        with tracer.invoke(IDS):
            with tracer.invoke(IDS):
                lm.canvas.sum()


def test_a_loop_after_the_result_says_so(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="result after the loop"), lm.generate(IDS, **RUN) as tracer:
        tracer.result.save()
        for step in tracer.steps:
            lm.canvas.sum()
