"""The run loop: a plain function over a `Sampler` and a network, which never edits a canvas in place."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.history import History, revised_positions
from dlm_lens.sampling.network import EditLogits, LogitsRequest, Network, NonFiniteLogitsError, check_finite
from dlm_lens.sampling.observers import Resumption, RunObserver, RunObservers, Stateful
from dlm_lens.sampling.samplers.base import Sampler
from dlm_lens.shapes import same_shape

OnLogits = Callable[[int, Tensor, Tensor], Tensor | None]
OnCanvas = Callable[[int, Tensor], Tensor | None]


LogitPositions = Literal["needed", "masked", "all"]
"""Where the head is evaluated: at the eligible positions, at every open one, or everywhere."""


def run_sampler(
    network: Network,
    sampler: Sampler,
    canvas: Int[Tensor, "batch position"],
    history: History,
    *,
    logits: LogitPositions = "needed",
    on_logits: OnLogits | None = None,
    on_canvas: OnCanvas | None = None,
    progress: bool = False,
    observers: Sequence[RunObserver] = (),
    noise: Stateful | None = None,
    resume: Resumption | None = None,
) -> DenoisingRun:
    """Run every step of `sampler` from `canvas`, or those until it has finished.

    Args:
        network: whose logits the sampler reads.
        sampler: plans the steps, says what is open, and proposes and selects at each; its `begin` has been called.
        canvas: the first canvas.
        history: where the steps are kept.
        logits: where the head is evaluated: at the eligible positions, at every open one, or everywhere.
        on_logits: as for `dlm_lens.denoise`.
        on_canvas: as for `dlm_lens.denoise`.
        progress: show a progress bar.
        observers: called at every step, in order.
        noise: the source of the sampler's random numbers.
        resume: an unfinished run that this one continues.

    Raises:
        NonFiniteLogitsError: its `partial` is the `DenoisingRun` of the steps before.
    """
    plans = sampler.plans(history.prompt_length, canvas.shape[1])
    seen = {(plan.block, plan.remaining): plan.seen for plan in plans}
    observing = RunObservers(observers, [*([] if noise is None else [noise]), sampler, history])
    own_forward = logits == "all" or observing.needs_full_logits
    sampler.proposes_all = observing.proposes_all
    over = resume is not None and resume.state.over
    if resume is not None:
        canvas = _resumed(resume, history, noise, sampler)
        plans = _after(plans, [step.plan for step in resume.steps], adaptive=sampler.adaptive)
    rows = int(network.model.get_input_embeddings().weight.shape[0])
    observing.start(sampler, history)
    if resume is not None and not over:
        _refill(network, observing, sampler, history, seen, own_forward=own_forward)
    run, step = sampler.progress
    with tqdm(total=len(plans), desc=run, unit=step, disable=not progress) as bar:
        steps = Upcoming(sampler, plans, len(history.plans))
        plan = None if over else steps.following(canvas)
        while plan is not None:
            left, canvas = canvas, _edited(on_canvas, plan.index, canvas, rows)
            plan = sampler.planned(plan, sampler.open_positions(canvas, plan.index), canvas != left)
            network.enter(plan)
            canvas = _observed(observing, sampler, plan, canvas, rows)
            masked = sampler.open_positions(canvas, plan.index)
            needed = sampler.needed(masked, plan)
            history.start(canvas, masked, needed.any(-1) if sampler.adaptive else None)
            evaluated = _evaluated(sampler, masked, plan, needed, logits)
            edit = _edit_logits(on_logits, plan.index, canvas)
            out = network.of_step(canvas, plan, LogitsRequest(evaluated, own_forward, observing.grad, edit))
            made, proposal, chosen = _proposed(sampler, history, canvas, out, evaluated, masked, plan)
            if sampler.proposes_all:
                _known_ids(made, rows, "a proposal that was assigned")
            # A trace may choose others, which stay as they are; a token may move to where nothing was evaluated.
            unmasked = chosen & masked & (masked if sampler.resizes else evaluated)
            left_open = sampler.open_positions(made, plan.index + 1)
            revised = revised_positions(canvas, masked, made, left_open)
            history.finish(plan, proposal, unmasked, revised, sampler.origins)
            canvas = made
            following = None if sampler.finished(canvas, plan) else steps.following(canvas)
            observing.finish(plan, canvas, proposal, unmasked, over=following is None)
            bar.update()
            plan = following
    observing.stop()
    return _finished(history, sampler, _edited(on_canvas, len(history.plans), canvas, rows))


def _evaluated(sampler: Sampler, masked: Tensor, plan: StepPlan, needed: Tensor, logits: LogitPositions) -> Tensor:
    return needed if logits == "needed" else needed | (masked & sampler.reach(masked, plan))


def _proposed(
    sampler: Sampler,
    history: History,
    canvas: Tensor,
    out: Tensor,
    evaluated: Tensor,
    masked: Tensor,
    plan: StepPlan,
) -> tuple[Tensor, Proposal, Tensor]:
    """The canvas, the proposal and the selection that the sampler makes of a step's logits.

    Raises:
        NonFiniteLogitsError: its `partial` is the run of the steps before.
    """
    try:
        check_finite(out, evaluated, plan.index)
        return sampler(canvas, out, evaluated, masked, plan)
    except NonFiniteLogitsError as error:
        error.partial = history.result()
        raise


def _finished(history: History, sampler: Sampler, canvas: Tensor) -> DenoisingRun:
    done = len(history.plans)
    history.start(canvas, sampler.open_positions(canvas, done))
    history.cut(sampler.final_length(canvas.shape[1], done))
    return history.result()


def _observed(observing: RunObservers, sampler: Sampler, plan: StepPlan, canvas: Tensor, rows: int) -> Tensor:
    """The canvas of a step after its observers, which may edit it.

    Raises:
        ValueError: an edit outside what the step computes, or an id that the model does not embed.
    """
    opened = partial(sampler.open_positions, step=plan.index)
    edited = observing.step(plan, canvas, opened, editable=not sampler.autoregressive)
    if edited is canvas:
        return canvas
    _known_ids(edited, rows, "an edit of the canvas")
    if plan.computed is not None and sampler.planned(plan, opened(edited), edited != canvas) != plan:
        raise ValueError(
            f"an observer edited step {plan.index} outside positions {plan.computed}, where the cache keeps "
            "keys and values; edit with on_canvas, which makes the step compute everything, or denoise without the "
            "cache (cache=None, or use_cache=False)"
        )
    return edited


class Upcoming:
    """The steps that are still to come, without those that an adaptive sampler leaves out.

    Args:
        sampler: of the run.
        plans: of the steps, in order.
        done: steps that are finished.
    """

    def __init__(self, sampler: Sampler, plans: Sequence[StepPlan], done: int) -> None:
        self.sampler, self.plans, self.done = sampler, deque(plans), done

    def following(self, canvas: Int[Tensor, "batch position"]) -> StepPlan | None:
        """The next step that runs, counted after the ones that ran; None if there is none."""
        while self.plans:
            plan = replace(self.plans.popleft(), index=self.done)
            if not self.sampler.leaves_out(self.sampler.open_positions(canvas, plan.index), plan):
                self.done += 1
                return plan
        return None


def _after(plans: list[StepPlan], done: Sequence[StepPlan], *, adaptive: bool) -> list[StepPlan]:
    if not adaptive or not done:
        return plans[len(done) :]
    last = done[-1].block, done[-1].remaining
    return plans[1 + [(plan.block, plan.remaining) for plan in plans].index(last) :]


def _refill(
    network: Network,
    observing: RunObservers,
    sampler: Sampler,
    history: History,
    seen: Mapping[tuple[int, int], int | None],
    *,
    own_forward: bool,
) -> None:
    """Make the passes again that the next step depends on, before a run is resumed (`Sampler.repeated_after`).

    The observers see those steps begin, so that hooks act in the passes as they did in them.
    """
    for at in sampler.repeated_after(history.plans):
        plan, canvas, masked = history.plans[at], history.canvases[at], history.masked[at]
        # As it was planned: the finished steps of a stored run do not say what their network saw.
        plan = replace(plan, seen=seen.get((plan.block, plan.remaining)))
        network.enter(plan)
        observing.step(plan, canvas, lambda _, masked=masked: masked)  # type: ignore[misc]
        network.of_step(canvas, plan, LogitsRequest(torch.zeros_like(masked), own_forward))


def _edit_logits(on_logits: OnLogits | None, step: int, canvas: Tensor) -> EditLogits | None:
    """The caller's `on_logits` as a function of the logits alone; None without one."""
    if on_logits is None:
        return None

    def edit(logits: Tensor) -> Tensor:
        # Its own copy of the canvas, as for on_canvas.
        replaced = on_logits(step, canvas.clone(), logits)
        return logits if replaced is None else same_shape("on_logits", logits, replaced, or_none=True)

    return edit


def _resumed(resume: Resumption, history: History, noise: Stateful | None, sampler: Sampler) -> Tensor:
    """The canvas, with history, generators and sampler as the finished steps left them."""
    resume.enter(history)
    own = {name: value.to(history.attention_mask.device) for name, value in resume.state.own.items()}
    if noise is not None:
        noise.restore(own)
    sampler.restore(own)
    history.restore(own)
    return resume.canvas(history)


def _known_ids(canvas: Tensor, rows: int, who: str) -> Tensor:
    """The canvas that `who` edited, whose ids have rows in the embedding.

    Raises:
        ValueError: naming the first id that has none.
    """
    outside = canvas[(canvas < 0) | (canvas >= rows)]
    if len(outside):
        raise ValueError(
            f"{who} wrote token id {int(outside[0])}, which has no row in the model's embedding of {rows}"
        )
    return canvas


def _edited(on_canvas: OnCanvas | None, step: int, canvas: Tensor, rows: int) -> Tensor:
    if on_canvas is None:
        return canvas
    # The callback gets its own copy: what it does to that in place must not rewrite history.
    replaced = on_canvas(step, canvas.clone())
    if replaced is None:
        return canvas
    # A copy: the callback may write the canvases of later steps into the tensor that it returned.
    replaced = same_shape("on_canvas", canvas, replaced, or_none=True)
    return _known_ids(replaced, rows, "on_canvas").clone()
