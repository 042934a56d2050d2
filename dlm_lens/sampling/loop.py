"""The denoising loop: a plain function over a `Sampler`, which never edits a canvas in place."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.sampling.history import History
from dlm_lens.sampling.host import Host
from dlm_lens.sampling.network import CanvasLogits, NonFiniteLogitsError, check_finite
from dlm_lens.sampling.result import Denoised
from dlm_lens.sampling.resuming import Resumption, Stateful, start_hosts, tell_state
from dlm_lens.sampling.sampler import Sampler

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
    hosts: Sequence[Host] = (),
    noise: Stateful | None = None,
    resume: Resumption | None = None,
) -> Denoised:
    """Run every step of `sampler` from `canvas`, or those until it has finished.

    `logits` says where the head is evaluated: at the eligible positions, at every masked one, or everywhere.
    Masks are recounted from the canvas at every step. `hosts` are told of every step, in order. `resume` goes on
    behind the steps of an unfinished run; `noise` is where the sampler's random numbers come from.

    Raises:
        NonFiniteLogitsError: its `partial` is the `Denoised` of the steps before.
    """
    plans = sampler.plans(history.prompt_length, canvas.shape[1])
    everywhere = logits == "all" or on_logits is not None or any(host.everywhere for host in hosts)
    grad = any(host.grad for host in hosts)
    if resume is not None:
        canvas = _go_on(resume, history, noise, sampler)
        plans = [] if resume.state.over else plans[len(resume.steps) :]
    start_hosts(hosts, sampler, history)
    for plan in tqdm(plans, desc="denoising", unit="step", disable=not progress):
        canvas = _edited(on_canvas, plan.index, canvas)
        for host in hosts:
            canvas = same_shape("the host", canvas, host.step(plan, canvas, is_masked(canvas)))
        masked = is_masked(canvas)
        history.start(canvas, masked)
        evaluated = sampler.eligible(masked, plan) if logits == "needed" else masked
        if everywhere:
            with torch.enable_grad() if grad else nullcontext():
                full = network.everywhere(canvas)
            replaced = on_logits(plan.index, canvas, full) if on_logits is not None else None
            rows = (full if replaced is None else same_shape("on_logits", full, replaced))[evaluated]
        else:
            rows = network.at(canvas, evaluated)
        try:
            check_finite(rows, evaluated, plan.index)
            canvas, proposal, selected = sampler(canvas, rows, evaluated, masked, plan)
        except NonFiniteLogitsError as error:
            error.partial = history.result()
            raise
        history.finish(plan, proposal, selected)
        for host in hosts:
            host.finish(plan, canvas, proposal, selected)
        over = sampler.finished(canvas, plan)
        tell_state(hosts, canvas, noise, sampler, over=over or plan.index == plan.total - 1)
        if over:
            break
    for host in hosts:
        host.stop()
    canvas = _edited(on_canvas, len(history.plans), canvas)
    history.start(canvas, is_masked(canvas))
    return history.result()


def _go_on(resume: Resumption, history: History, noise: Stateful | None, sampler: Sampler) -> Tensor:
    """The canvas, with history, generators and sampler as the finished steps left them."""
    resume.enter(history)
    own = {name: value.to(history.attention_mask.device) for name, value in resume.state.own.items()}
    if noise is not None:
        noise.restore(own)
    sampler.restore(own)
    return resume.canvas(history)


def _edited(on_canvas: OnCanvas | None, step: int, canvas: Tensor) -> Tensor:
    if on_canvas is None:
        return canvas
    # The callback gets its own copy: what it does to that in place must not rewrite history.
    replaced = on_canvas(step, canvas.clone())
    return canvas if replaced is None else same_shape("on_canvas", canvas, replaced)


def same_shape(name: str, before: Tensor, after: Any) -> Tensor:
    """What a callback returned, if it can stand in for `before`.

    Raises:
        ValueError: it is no tensor, or of another shape.
    """
    if not isinstance(after, torch.Tensor) or after.shape != before.shape:
        kind = f"a tensor of shape {list(after.shape)}" if isinstance(after, torch.Tensor) else repr(after)
        raise ValueError(f"{name} returned {kind}; it must return None or a tensor of shape {list(before.shape)}")
    return after.to(before.device)
