"""The denoising loop: a plain function over a `Sampler`, which never edits a canvas in place."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.sampling.denoising_run import DenoisingRun, History
from dlm_lens.sampling.network import CanvasLogits, NonFiniteLogitsError, check_finite
from dlm_lens.sampling.observers import Resumption, RunObserver, RunObservers, Stateful, same_shape
from dlm_lens.sampling.samplers.base import Sampler

OnLogits = Callable[[int, Tensor, Tensor], Tensor | None]
OnCanvas = Callable[[int, Tensor], Tensor | None]


def run_sampler(
    network: CanvasLogits,
    sampler: Sampler,
    canvas: Int[Tensor, "batch position"],
    history: History,
    *,
    is_masked: Callable[[Tensor], Bool[Tensor, "batch position"]],
    logits: Literal["needed", "masked", "all"] = "needed",
    on_logits: OnLogits | None = None,
    on_canvas: OnCanvas | None = None,
    progress: bool = False,
    observers: Sequence[RunObserver] = (),
    noise: Stateful | None = None,
    resume: Resumption | None = None,
) -> DenoisingRun:
    """Run every step of `sampler` from `canvas`, or those until it has finished.

    `logits` says where the head is evaluated: at the eligible positions, at every masked one, or everywhere.
    Masks are recounted from the canvas at every step. `observers` see every step, in order. `resume` continues
    after the steps of an unfinished run; `noise` is where the sampler's random numbers come from.

    Raises:
        NonFiniteLogitsError: its `partial` is the `DenoisingRun` of the steps before.
    """
    plans = sampler.plans(history.prompt_length, canvas.shape[1])
    guests = RunObservers(observers, [sampler] if noise is None else [noise, sampler])
    everywhere = logits == "all" or on_logits is not None or guests.needs_full_logits
    if resume is not None:
        canvas = _go_on(resume, history, noise, sampler)
        plans = [] if resume.state.over else plans[len(resume.steps) :]
    rows = int(network.model.get_input_embeddings().weight.shape[0])
    guests.start(sampler, history)
    for plan in tqdm(plans, desc="denoising", unit="step", disable=not progress):
        canvas = _edited(on_canvas, plan.index, canvas, rows)
        canvas = guests.step(plan, canvas, is_masked)
        masked = is_masked(canvas)
        history.start(canvas, masked)
        evaluated = sampler.eligible(masked, plan) if logits == "needed" else masked
        if everywhere:
            found = _all_logits(network, canvas, on_logits, plan.index, grad=guests.grad)[evaluated]
        else:
            found = network.at(canvas, evaluated)
        try:
            check_finite(found, evaluated, plan.index)
            canvas, proposal, unmasked = sampler(canvas, found, evaluated, masked, plan)
        except NonFiniteLogitsError as error:
            error.partial = history.result()
            raise
        history.finish(plan, proposal, unmasked)
        over = sampler.finished(canvas, plan)
        guests.finish(plan, canvas, proposal, unmasked, over=over)
        if over:
            break
    guests.stop()
    canvas = _edited(on_canvas, len(history.plans), canvas, rows)
    history.start(canvas, is_masked(canvas))
    return history.result()


def _all_logits(
    network: CanvasLogits, canvas: Tensor, on_logits: OnLogits | None, step: int, *, grad: bool
) -> Float[Tensor, "batch position d_vocab"]:
    """Logits of every position, as the caller wants them."""
    with torch.enable_grad() if grad else nullcontext():
        logits = network.everywhere(canvas)
    replaced = on_logits(step, canvas, logits) if on_logits is not None else None
    return logits if replaced is None else same_shape("on_logits", logits, replaced)


def _go_on(resume: Resumption, history: History, noise: Stateful | None, sampler: Sampler) -> Tensor:
    """The canvas, with history, generators and sampler as the finished steps left them."""
    resume.enter(history)
    own = {name: value.to(history.attention_mask.device) for name, value in resume.state.own.items()}
    if noise is not None:
        noise.restore(own)
    sampler.restore(own)
    return resume.canvas(history)


def _known_ids(canvas: Tensor, rows: int) -> Tensor:
    """What the caller put on the canvas, known to have rows in the embedding."""
    outside = canvas[(canvas < 0) | (canvas >= rows)]
    if len(outside):
        raise ValueError(
            f"on_canvas returned token id {int(outside[0])}, which has no row in the model's embedding of {rows}"
        )
    return canvas


def _edited(on_canvas: OnCanvas | None, step: int, canvas: Tensor, rows: int) -> Tensor:
    if on_canvas is None:
        return canvas
    # The callback gets its own copy: what it does to that in place must not rewrite history.
    replaced = on_canvas(step, canvas.clone())
    return canvas if replaced is None else _known_ids(same_shape("on_canvas", canvas, replaced), rows)
