from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling import DenoisingRun, RunObserver, Sampler, StepObserver, StepPlan
from dlm_lens.testing import tiny


class Calls(RunObserver):
    """Notes which methods are called; `edit` changes the canvas of a step."""

    def __init__(self, edit: Any = None) -> None:
        self.names: list[str] = []
        self.samplers: list[Sampler] = []
        self.edit = edit

    def use_network(self, forward: Any) -> None:
        self.names.append("use_network")

    def start(self, sampler: Sampler, content: Tensor, answer: Tensor | None = None) -> None:
        self.names.append("start")
        self.samplers.append(sampler)
        assert answer is None

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        self.names.append("step")
        return canvas if self.edit is None else self.edit(canvas)

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Any, unmasked: Tensor) -> None:
        self.names.append("finish")

    def keep(self, state: Any) -> None:
        self.names.append("keep")

    def stop(self) -> None:
        self.names.append("stop")

    def close(self) -> None:
        self.names.append("close")


@pytest.mark.parametrize("family", ["llada", "causal"])
@pytest.mark.parametrize("keeps", [True, False])
def test_an_observer_is_called_in_order(family: str, keeps: bool) -> None:
    observer = Calls()
    observer.keeps_state = keeps
    steps = {} if family == "causal" else {"steps": 2}
    dl.denoise(tiny(family), [5, 6], gen_length=2, observers=observer, **steps)
    step = ["step", "finish", *["keep"] * keeps]
    assert observer.names == ["use_network", "start", *step, *step, "stop", "close"]
    assert observer.samplers[0].autoregressive == (family == "causal")


def test_an_observer_is_closed_where_the_run_raises() -> None:
    observer = Calls(lambda canvas: canvas[:, 1:])
    with pytest.raises(ValueError, match="the observer returned a tensor of shape"):
        dl.denoise(tiny("llada"), [5, 6], gen_length=2, steps=2, observers=observer)
    assert observer.names == ["use_network", "start", "step", "close"]


def test_an_observer_that_returns_nothing_is_told_what_to_return() -> None:
    observer = Calls(lambda canvas: None)
    with pytest.raises(ValueError, match=r"observer returned None; it must return a tensor of shape \[1, 4\]$"):
        dl.denoise(tiny("llada"), [5, 6], gen_length=2, steps=2, observers=observer)


def test_an_observer_edits_canvases_but_not_those_of_an_ar_model() -> None:
    def plant(canvas: Tensor) -> Tensor:
        return canvas.index_fill(1, torch.tensor([3]), 9)

    run = dl.denoise(tiny("llada"), [5, 6], gen_length=4, steps=2, block_length=4, observers=Calls(plant))
    assert run.canvases[:, 0, 3].tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="Calls edited the canvas at step 0; an AR model has no canvas to edit"):
        dl.denoise(tiny("causal"), [5, 6], gen_length=4, observers=Calls(plant))
    dl.denoise(tiny("causal"), [5, 6], gen_length=4, observers=Calls(Tensor.clone))


def test_an_edit_in_place_is_one_like_every_other() -> None:
    def plant(canvas: Tensor, position: int, token: int = 9) -> Tensor:
        canvas[:, position] = token
        return canvas

    given: dict[str, Any] = {"gen_length": 8, "steps": 8, "block_length": 4}
    run = dl.denoise(tiny("llada"), [5, 6, 7, 8], observers=Calls(lambda canvas: plant(canvas, 1)), **given)
    assert run.canvases[:, 0, 1].tolist() == [9] * 9
    with pytest.raises(ValueError, match="Calls edited the canvas at step 0; an AR model has no canvas to edit"):
        dl.denoise(tiny("causal"), [5, 6], gen_length=4, observers=Calls(lambda canvas: plant(canvas, 1)))
    with pytest.raises(ValueError, match="wrote token id -100, which has no row"):
        dl.denoise(tiny("llada"), [5, 6], observers=Calls(lambda canvas: plant(canvas, 1, -100)), **given)
    calls = Calls()
    calls.edit = lambda canvas: plant(canvas, 1) if calls.names.count("step") == 4 else canvas
    with pytest.raises(ValueError, match="an observer edited step 3 outside positions"):
        dl.denoise(tiny("llada"), [5, 6, 7, 8], observers=calls, cache="prefix", **given)


class Scribbles(Calls):
    """Writes into every canvas that it gets, and returns another one."""

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        before = canvas.clone()
        canvas.fill_(9)
        return before

    def finish(self, plan: StepPlan, canvas: Tensor, proposal: Any, unmasked: Tensor) -> None:
        canvas.fill_(9)


def test_what_is_written_into_a_canvas_and_not_returned_changes_nothing() -> None:
    def on_logits(step: int, canvas: Tensor, logits: Tensor) -> None:
        canvas.fill_(9)

    for family in ("llada", "causal"):
        given: dict[str, Any] = {"gen_length": 4, **({} if family == "causal" else {"steps": 4})}
        expected = dl.denoise(tiny(family), [5, 6], **given).canvases
        for settings in ({"on_logits": on_logits}, {"observers": Scribbles()}):
            assert dl.denoise(tiny(family), [5, 6], **given, **settings).canvases.equal(expected)


def test_an_observer_may_return_one_tensor_at_every_step() -> None:
    kept: list[Tensor] = []

    def planted(canvas: Tensor) -> Tensor:
        """Counts down at the prompt's first token, so that every canvas is edited."""
        edited = canvas.clone()
        edited[:, 0] -= 1
        return edited

    def buffered(canvas: Tensor) -> Tensor:
        kept.append(kept[0].copy_(planted(canvas)) if kept else planted(canvas))
        return kept[0]

    given: dict[str, Any] = {"gen_length": 4, "steps": 4, "block_length": 4}
    run = dl.denoise(tiny("llada"), [15, 6], observers=Calls(buffered), **given)
    assert run.canvases[:-1, 0, 0].tolist() == [14, 13, 12, 11]
    assert run.canvases.equal(dl.denoise(tiny("llada"), [15, 6], observers=Calls(planted), **given).canvases)


@pytest.mark.parametrize("observers", [3, Calls, [Calls(), None], "x"])
def test_other_objects_are_no_observers(observers: Any) -> None:
    with pytest.raises(ValueError, match=r"observers is .*; it must be a RunObserver, such as dlm_lens\.Recorder"):
        dl.denoise(tiny("llada"), [5], observers=observers)


def test_no_observers_are_none_in_every_host() -> None:
    model = tiny("llada")
    wanted = dl.denoise(model, [1, 2, 3], observers=None, gen_length=4).tokens
    for call in (dl.DiffusionLM(model, check=False).generate, dl.bridge(model).denoise):
        assert call([1, 2, 3], observers=None, gen_length=4).tokens.equal(wanted)


def test_the_present_step_of_an_ar_run_is_the_prefix() -> None:
    class Prefixes(StepObserver):
        lengths: tuple[int, ...] = ()

        def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
            super().step(plan, canvas, masked)
            assert self.now is not None
            self.lengths += (self.now.tokens.shape[1],)
            assert plan.prefix_length == self.lengths[-1]
            return canvas

    model = tiny("causal")
    observer = Prefixes(model)
    run = dl.denoise(model, [5, 6], gen_length=3, observers=observer)
    assert observer.lengths == (2, 3, 4)
    assert run.autoregressive


def test_a_run_of_canvases_unmasks_nothing() -> None:
    canvases = torch.arange(12).reshape(2, 1, 6)
    masked = canvases > 9
    run = DenoisingRun.of_canvases(
        canvases, masked, torch.ones(1, 6, dtype=torch.bool), prompt_length=4, settings={"sampler": "made up"}
    )
    assert run.steps == 2
    assert run.tokens.equal(canvases[-1])
    assert run.spans == ((4, 6),) * 2
    assert run.blocks == (0, 0)
    assert not run.unmasked.any()
    assert not run.autoregressive
    assert run.proposals.equal(canvases)
