"""`tracer.steps`: every form of selection, and what happens out of order."""

import copy
import subprocess
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nnsight.intervention.interleaver import OutOfOrderError

import dlm_lens as dl
from dlm_lens.hooks import ablate
from dlm_lens.testing import tiny
from tests.preloaded import python

IDS = [5, 9, 14]
RUN = {"steps": 8, "gen_length": 8, "block_length": 4}
LMS: dict[str, Any] = {}


@pytest.fixture(scope="module")
def lm() -> dl.DiffusionLM:
    return dl.DiffusionLM(tiny("llada"))


@pytest.fixture(scope="module")
def plain(lm: Any) -> dl.DenoisingRun:
    return dl.denoise(lm._module, IDS, **RUN)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (2, [2]),
        (-1, [7]),
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, 3), [0, 3, 6]),
        (slice(-2, None), [6, 7]),
        (slice(None, -5), [0, 1, 2]),
        (slice(6, 100), [6, 7]),
        (slice(5, 2), []),
        ([0, -1], [0, 7]),
        ([5, 1, 5], [1, 5]),
        (range(3, 6), [3, 4, 5]),
        (torch.tensor([1, 4]), [1, 4]),
        (np.int64(2), [2]),
        (np.array([6, 2]), [2, 6]),
        ([], []),
        (lambda step: step.block == 1, [4, 5, 6, 7]),
        (lambda step: step.progress.mean() >= 0.5, [4, 5, 6, 7]),
        (lambda step: False, []),
    ],
    ids=lambda value: "a function" if callable(value) else str(value),
)
def test_a_selection_visits_its_steps(lm: Any, plain: dl.DenoisingRun, key: Any, expected: list[int]) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        after = [].save()
        for step in tracer.steps[key]:
            seen.append((int(step), lm.layers[0].attn.pattern.sum().item()))
        after.append("ran")
        run = tracer.result.save()
    assert [index for index, _ in seen] == expected
    assert after == ["ran"]
    assert run.tokens.equal(plain.tokens)
    for index, total in seen:
        assert total == pytest.approx(4 * 11, rel=1e-5), index


def test_where_tests_each_step_as_it_begins(lm: Any, plain: dl.DenoisingRun) -> None:
    position = int(plain.step_of[0].argmax())
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps.where(lambda s: s.masked[0, position] and s.progress[0] > 0.2):
            seen.append(int(step))
    assert seen == [t for t in range(8) if plain.masked[t, 0, position] and plain.progress[t, 0] > 0.2]
    assert len(seen) == 6


def test_all_steps_without_an_index(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps:
            seen.append(step.index)
    assert seen == list(range(8))


def test_each_step_is_served_its_own_values(lm: Any, plain: dl.DenoisingRun) -> None:
    """The confidence of a step is that of the untraced run, whichever steps were skipped before."""
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps[1::3]:
            seen.append((int(step), lm.sampler.confidence, lm.sampler.unmasked.clone()))
    for index, confidence, unmasked in seen:
        torch.testing.assert_close(confidence.cpu(), plain.confidence[index])
        assert unmasked.equal(plain.unmasked[index])


def test_loops_in_a_row(lm: Any, plain: dl.DenoisingRun) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps[1:3]:
            seen.append((int(step), lm.canvas.clone()))
        for step in tracer.steps[4]:
            seen.append((int(step), lm.canvas.clone()))
        for step in tracer.steps.where(lambda s: s.masked.sum() <= 2):
            seen.append((int(step), lm.canvas.clone()))
        run = tracer.result.save()
    assert [index for index, _ in seen] == [1, 2, 4, 6, 7]
    assert all(canvas.equal(plain.canvases[index]) for index, canvas in seen)
    assert run.tokens.equal(plain.tokens)


def test_an_open_loop_continues_where_the_last_one_stopped(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps:
            seen.append(int(step))
            if step == 2:
                break
        for step in tracer.steps:
            seen.append(int(step))
    assert seen == list(range(8))


def test_an_early_stop_keeps_what_was_saved(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps:
            seen.append(lm.layers[1].attn.pattern)
            if step == 2:
                tracer.stop()
    assert len(seen) == 3
    with lm.generate(IDS, **RUN) as tracer:
        after = [].save()
        for step in tracer.steps:
            after.append(int(step))
    assert after == list(range(8))


def test_an_early_stop_ends_the_loops_of_the_other_invokes(lm: Any) -> None:
    with lm.generate(**RUN) as tracer:
        with tracer.invoke(IDS):
            first, second, after = [].save(), [].save(), [].save()
            for step in tracer.steps:
                first.append(lm.layers[0].attn.pattern)
                if step == 2:
                    tracer.stop()
        with tracer.invoke(IDS):
            for step in tracer.steps:
                second.append(int(step))
            after.append(len(second))
    assert len(first) == 3
    assert second == [0, 1, 2]
    assert after == [3]


def test_a_value_that_an_early_stop_left_out_is_explained(lm: Any) -> None:
    message = r"tracer.stop\(\) ended the run before 'model\S*layers.1\S*', which this block waits for"
    with pytest.raises(OutOfOrderError, match=message), lm.generate(**RUN) as tracer:
        with tracer.invoke(IDS):
            for step in tracer.steps:
                lm.layers[0].attn.pattern.sum()
                if step == 2:
                    tracer.stop()
        with tracer.invoke(IDS):
            for step in tracer.steps:
                lm.layers[1].attn.pattern.sum()
    with pytest.raises(OutOfOrderError, match="was computed: stop after"), lm.trace() as tracer:
        with tracer.invoke(IDS):
            lm.layers[0].output.sum()
            tracer.stop()
        with tracer.invoke(IDS):
            lm.layers[1].output.sum()


@pytest.mark.parametrize("index", [0, 3, 7])
def test_layers_out_of_order_raise_at_every_step(lm: Any, index: int) -> None:
    with pytest.raises(OutOfOrderError, match=f"step {index}"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[index]:
            lm.layers[1].output.sum()
            lm.layers[0].output.sum()


def test_the_pattern_before_the_queries_raises(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="order in which the model runs"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[:4]:
            lm.layers[1].attn.pattern.sum()
            lm.layers[1].attn.q.sum()


def test_a_run_after_an_error_is_clean(lm: Any, plain: dl.DenoisingRun) -> None:
    with pytest.raises(ZeroDivisionError), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[2]:
            lm.canvas[:, 0] = 1 / 0
    assert lm.generate(IDS, **RUN).tokens.equal(plain.tokens)
    assert dl.denoise(lm._module, IDS, **RUN).tokens.equal(plain.tokens)


@pytest.mark.parametrize("key", [8, -9, [0, 12]])
def test_a_step_that_is_not_there(lm: Any, key: Any) -> None:
    with pytest.raises(IndexError, match="this run has 8 steps, 0 to 7"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[key]:
            lm.canvas.sum()


@pytest.mark.parametrize(
    ("key", "visits"),
    [(-1, None), (slice(-2, None), None), (slice(None, -1), None), ([0, -1], None), (5, None),
     (3, [3]), ([0, 3], [0, 3]), (slice(2, None), [2, 3]), (slice(5, 7), []), (lambda step: step > 1, [2, 3])],
    ids=lambda value: "a function" if callable(value) else str(value),
)  # fmt: skip
def test_steps_that_a_run_which_ends_early_does_not_reach(lm: Any, key: Any, visits: list[int] | None) -> None:
    early = {"gen_length": 8, "block_length": 2, "threshold": 1e-6}  # every step decides a block
    assert dl.denoise(lm._module, IDS, **early).steps == 4

    def visited() -> list[int]:
        with lm.generate(IDS, **early) as tracer:
            seen = [].save()
            for step in tracer.steps[key]:
                seen.append(int(step))
        return seen

    if visits is None:
        with pytest.raises(IndexError, match=r"counts 8 steps, but this run ended after 4.*dl\.denoise"):
            visited()
    else:
        assert visited() == visits
    assert lm.generate(IDS, **early).steps == 4


@pytest.mark.parametrize("key", ["3", 2.0, [1, 2.5], None])
def test_what_is_no_index(lm: Any, key: Any) -> None:
    with (
        pytest.raises(TypeError, match=r"whole number|interpreted as an integer"),
        lm.generate(IDS, **RUN) as tracer,
    ):
        for step in tracer.steps[key]:
            lm.canvas.sum()


def test_a_step_that_has_passed(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="requests step 1, but the run is at step 5"):
        with lm.generate(IDS, **RUN) as tracer:
            for step in tracer.steps[4]:
                lm.canvas.sum()
            for step in tracer.steps[1:3]:
                lm.canvas.sum()


def test_steps_when_the_run_is_over(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="the run is over"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps.where(lambda s: False):
            lm.canvas.sum()
        for step in tracer.steps[3]:
            lm.canvas.sum()


def test_a_value_after_the_loop_has_passed(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match="inside `for step in tracer"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[4]:
            lm.canvas.sum()
        lm.layers[0].output.sum()


@pytest.mark.parametrize("key", [0, slice(2)], ids=str)
@pytest.mark.parametrize("body", ["nothing", "pattern", "head"])
@pytest.mark.parametrize("after", ["canvas", "first layer", "pattern", "head", "sampler"])
def test_no_value_of_a_step_after_the_loop_whatever_its_body_read(lm: Any, key: Any, body: str, after: str) -> None:
    def read(what: str) -> None:
        if what == "canvas":
            lm.canvas.sum()
        if what == "first layer":
            lm.layers[0].output.sum()
        if what == "pattern":
            lm.layers[1].attn.pattern.sum()
        if what == "head":
            lm.lm_head.output.sum()
        if what == "sampler":
            lm.sampler.confidence.sum()

    with pytest.raises(OutOfOrderError, match="inside `for step in tracer"):
        with lm.generate(IDS, steps=4, gen_length=4) as tracer:
            for step in tracer.steps[key]:
                read(body)
            read(after)


@pytest.mark.parametrize("body", ["nothing", "head"])
def test_the_result_and_later_steps_after_the_loop(lm: Any, plain: dl.DenoisingRun, body: str) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps[0]:
            if body == "head":
                lm.lm_head.output.sum()
        for step in tracer.steps[1:3]:
            seen.append(lm.canvas.clone())
        run = tracer.result.save()
    assert all(canvas.equal(plain.canvases[index + 1]) for index, canvas in enumerate(seen))
    assert len(seen) == 2
    assert run.tokens.equal(plain.tokens)


@pytest.mark.parametrize("key", [slice(0, 2), slice(1, 3), slice(4, None), 3, [0, 2, 5]], ids=str)
@pytest.mark.parametrize("point", ["pattern", "scores"])
@pytest.mark.parametrize("family", ["llada", "sink_qwen"])
def test_iter_counts_the_forwards_whose_pattern_nobody_read(family: str, point: str, key: Any) -> None:
    lm = LMS.setdefault(family, dl.DiffusionLM(tiny(family)))
    with lm.generate(IDS, **RUN) as tracer:
        every = [].save()
        for step in tracer.steps:
            every.append(getattr(lm.layers[1].attn, point).clone())
    wanted = [key] if isinstance(key, int) else key if isinstance(key, list) else list(range(8))[key]
    # An open loop ends when the model stops, which nnsight says in a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with lm.generate(IDS, **RUN) as tracer:
            seen = [].save()
            for index in tracer.iter[key]:
                seen.append((index, getattr(lm.layers[1].attn, point).clone()))
    assert [index for index, _ in seen] == wanted
    assert all(torch.equal(value, every[index]) for index, value in seen)


def test_steps_belong_to_a_run(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match=r"lm\.generate"), lm.trace(IDS) as tracer:
        for step in tracer.steps:
            lm.canvas.sum()


def test_the_canvas_belongs_to_a_run(lm: Any) -> None:
    with pytest.raises(OutOfOrderError, match=r"model\.canvas"), lm.trace(IDS):
        lm.canvas.sum()


def test_with_instead_of_for(lm: Any) -> None:
    with pytest.raises(TypeError, match="for step in"), lm.generate(IDS, **RUN) as tracer:
        with tracer.steps[2]:
            lm.canvas.sum()


def test_where_wants_a_function(lm: Any) -> None:
    with pytest.raises(TypeError, match="where takes a function"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps.where(3):
            lm.canvas.sum()


def test_steps_outside_of_a_trace(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        pass
    with pytest.raises(ValueError, match=r"tracer\.steps"):
        next(iter(tracer.steps))


def test_guidance_does_not_shift_the_numbering(lm: Any) -> None:
    guided = dl.denoise(lm._module, IDS, cfg_scale=1.5, **RUN)
    with lm.generate(IDS, cfg_scale=1.5, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps[2::2]:
            canvas = lm.canvas.clone()
            pattern = lm.layers[1].attn.pattern
            seen.append((int(step), canvas, pattern, lm.sampler.unmasked.clone()))
        run = tracer.result.save()
    assert [index for index, *_ in seen] == [2, 4, 6]
    for index, canvas, pattern, unmasked in seen:
        assert canvas.equal(guided.canvases[index])
        assert unmasked.equal(guided.unmasked[index])
        assert len(pattern) == 2  # conditional, unconditional
        assert not torch.allclose(pattern[0], pattern[1])
    assert run.tokens.equal(guided.tokens)


def test_patterns_are_materialised_only_where_somebody_reads_them(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_lens.attention import functions

    calls: list[int] = []
    hooked = functions.hooked_attention

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.layer_idx)
        return hooked(module, *args, **kwargs)

    monkeypatch.setattr(functions, "hooked_attention", counting)
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[3:5]:
            lm.layers[0].attn.v.sum()
            lm.layers[1].attn.pattern.sum()
    assert calls == [1, 1]
    lm.generate(IDS, **RUN)
    assert calls == [1, 1]


def test_a_run_inside_a_run_is_refused(lm: Any) -> None:
    with pytest.raises(RuntimeError, match="inside the body of another"), lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[2]:
            lm.generate(IDS, **RUN)


def test_a_traced_run_in_a_callback_is_refused_and_a_plain_one_is_its_own(lm: Any, plain: dl.DenoisingRun) -> None:
    def traced(on_canvas: Any) -> tuple[dl.DenoisingRun, list[torch.Tensor]]:
        with lm.generate(IDS, **RUN, on_canvas=on_canvas) as tracer:
            values = [].save()
            for step in tracer.steps[2:5]:
                lm.layers[0].attn.apply(ablate("z", "masked"), step)
                values.append(lm.layers[1].attn.z)
            run = tracer.result.save()
        return run, values

    inside: list[dl.DenoisingRun] = []
    (run, values), (again, values_again) = (
        traced(call) for call in (lambda *_: None, lambda *_: inside.append(dl.denoise(lm, IDS, **RUN)))
    )
    assert again.canvases.equal(run.canvases)
    assert [one.equal(other) for one, other in zip(values, values_again, strict=True)] == [True] * 3
    assert [one.canvases.equal(plain.canvases) for one in inside] == [True] * 9
    with pytest.raises(RuntimeError, match=r"in a callback such as on_canvas call dlm_lens.denoise\(lm, ...\)"):
        traced(lambda *_: lm.generate(IDS, **RUN))


def test_a_second_thread_is_refused(lm: Any, plain: dl.DenoisingRun) -> None:
    with ThreadPoolExecutor(1) as pool:
        with lm.generate(IDS, **RUN) as tracer:
            for step in tracer.steps[2]:
                error = pool.submit(lm.generate, IDS, **RUN).exception()
                message = [str(error)].save()
            run = tracer.result.save()
    assert "another thread is tracing this model" in message[0]
    assert run.tokens.equal(plain.tokens)


def test_generate_in_a_function_says_what_to_do(lm: Any) -> None:
    def wrapper() -> Any:
        return lm.generate(IDS, **RUN)

    with pytest.raises(TypeError, match="not in a function that returns it"), wrapper():
        pass


@pytest.mark.long
def test_code_from_stdin_says_what_to_do() -> None:
    code = """
import dlm_lens as dl
from dlm_lens.testing import tiny
lm = dl.DiffusionLM(tiny("llada"), check=False)
with lm.generate([1, 2], steps=2, gen_length=2) as tracer:
    pass
"""
    done = subprocess.run([python(), "-"], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not on stdin" in done.stderr


def test_what_was_not_saved_is_gone(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        for step in tracer.steps[2]:
            forgotten = lm.layers[0].attn.pattern
    with pytest.raises(NameError):
        forgotten.sum()


def test_one_layer_s_pattern_is_alive_at_a_time(lm: Any) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        alive = [].save()
        for step in tracer.steps:
            for layer in range(2):
                pattern = lm.layers[layer].attn.pattern
                seen.append(weakref.ref(pattern))
                del pattern
                lm.layers[layer].output.sum()
                alive.append(sum(ref() is not None for ref in seen))
    assert len(seen) == 16
    assert max(alive) <= 1


def test_a_step_is_copied_and_read_back_with_what_lies_beside_it(lm: Any, tmp_path: Path) -> None:
    with lm.generate(IDS, **RUN) as tracer:
        seen = [].save()
        for step in tracer.steps:
            seen.append((step, lm.layers[0].attn.pattern.clone()))
    torch.save(seen, tmp_path / "seen.pt")
    read = torch.load(tmp_path / "seen.pt", weights_only=False)
    for copies in (read, copy.deepcopy(seen), [(copy.copy(step), pattern) for step, pattern in seen]):
        for (one, pattern), (other, same) in zip(seen, copies, strict=True):
            assert (int(other), other.total, other.block, other.span) == (int(one), 8, one.block, one.span)
            assert other.tokens.equal(one.tokens)
            assert other.run.progress.equal(one.run.progress)
            assert pattern.equal(same)
