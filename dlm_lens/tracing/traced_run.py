"""A denoising run inside a trace: its steps as nnsight locations, rows of each invoke, and scanning."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from nnsight.intervention.batching import Batcher
from nnsight.intervention.interleaver import Interleaver
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import Parameter

from dlm_lens.attention import ColumnStats, RunStep
from dlm_lens.attention.cache_argument import returned_cache
from dlm_lens.printable import shown
from dlm_lens.sampling import DenoisingRun, RunObserver, Sampler, StepPlan, collecting_columns, denoise, part_of_run
from dlm_lens.sampling.observers import known_progress
from dlm_lens.tracing.steps import STEP

PROMPT_NAMES = ("prompt", "input_ids", "attention_mask")
"""What every invoke gives of its own."""


class RowBatcher(Batcher):
    """nnsight's batcher for runs: splits a `DenoisingRun`, and with guidance both halves of a doubled batch."""

    guided = False

    def __init__(self, envoy: Any, kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(envoy, kwargs)
        self._copies: list[tuple[Tensor, Any, Tensor, int]] = []

    def narrow(self, value: Any, group: Any) -> Any:
        """The rows of a value that belong to an invoke."""
        self._write_back()
        if isinstance(value, DenoisingRun) and self.batching and group is not None:
            with unset_fake_temporarily():  # under lm.scan a run's tensors are real
                own = part_of_run(value, None, range(group[0], group[0] + group[1]))
                return replace(own, rows=None)  # an invoke counts its own rows
        return super().narrow(value, group)

    def widen(self, full: Any, group: Any, edited: Any) -> Any:
        """The value of the batch with the rows that an invoke assigned."""
        self._write_back()
        return super().widen(full, group, edited)

    def assemble_skip(self, running: Any) -> Any:
        """The value that the model goes on with, after all workers."""
        self._write_back()
        return super().assemble_skip(running)

    def _write_back(self) -> None:
        """Write what invokes edited in place in their copies of both halves into the batch that these are of."""
        copies, self._copies = self._copies, []
        for tensor, (start, size), copy, version in copies:
            if copy._version != version:
                tensor[start : start + size] = copy[:size]
                tensor[self.total + start : self.total + start + size] = copy[size:]

    def _narrow_tensor(self, tensor: Tensor, group: Any) -> Tensor:
        if not self._doubled(tensor):
            _align_gradient(tensor if tensor._base is None else tensor._base)
            return super()._narrow_tensor(tensor, group) if tensor.ndim else tensor
        start, size = group
        copy = torch.cat([half[start : start + size] for half in tensor.chunk(2)])
        self._copies.append((tensor, group, copy, copy._version))
        return copy

    def _widen_tensor(self, full: Tensor, group: Any, edited: Tensor) -> Tensor:
        if not self._doubled(full):
            return super()._widen_tensor(full, group, edited) if full.ndim else edited
        start, size = group
        halves = zip(full.chunk(2), edited.chunk(2), strict=True)
        return torch.cat([torch.cat([whole[:start], mine, whole[start + size :]]) for whole, mine in halves])

    def _doubled(self, tensor: Tensor) -> bool:
        return self.guided and tensor.ndim > 0 and tensor.shape[0] == 2 * self.total


def _align_gradient(base: Tensor) -> None:
    """Give the gradient of a tensor, if it has one, the tensor's own strides.

    nnsight cuts the rows of an invoke out of this gradient by the strides of the values, and autograd returns it in
    others: transposed, expanded, or as a part of a larger tensor.
    """
    strides, offset = base.stride(), base.storage_offset()

    def align(grad: Tensor) -> Tensor:
        if (grad.stride(), grad.storage_offset()) == (strides, offset):
            return grad
        size = offset + 1 + sum((count - 1) * stride for count, stride in zip(grad.shape, strides, strict=True))
        return grad.new_empty(size).as_strided(grad.shape, strides, offset).copy_(grad)

    if base.requires_grad and not isinstance(base, Parameter):  # which keeps its hooks after the trace
        base.register_hook(align)


class PromptBatcher(RowBatcher):
    """`RowBatcher` of a `DiffusionLM`, which reads the prompts of every invoke once."""

    def add(self, *inputs: Any, **kwargs: Any) -> list[int] | None:
        """As nnsight's, with the prompts read once; `invokes` keeps them in place of the inputs.

        Raises:
            ValueError: a setting that the trace or an earlier invoke has with another value.
        """
        prompts = self.envoy.read_invoke(*inputs, **kwargs)
        before = [self.kwargs, self.extra_kwargs, *(given for _, given in self.invokes)]
        for name, value in kwargs.items():
            for given in before if name not in PROMPT_NAMES else ():
                if name in given and not _alike(given[name], value):
                    raise ValueError(
                        f"tracer.invoke({name}={shown(value)}): the prompts of a trace share one run, which has "
                        f"{name}={shown(given[name])}; give settings once, or trace the prompts one after the other"
                    )
        if prompts is None:
            self.extra_kwargs.update(kwargs)
            return None
        group = [self.total, len(prompts.ids)]
        self.total += group[1]
        self.invokes.append((prompts, kwargs))
        return group

    def assemble(self, fn: Any) -> tuple[Any, ...]:
        """As nnsight's.

        Raises:
            TypeError: there is no prompt.
        """
        given = {**self.kwargs, **self.extra_kwargs}
        embedded = "inputs_embeds" in given and not is_generate(fn)
        if not self.invokes and not embedded:
            raise TypeError(
                "there is no prompt; give one to lm.generate(...), lm.trace(...) or at least one tracer.invoke(...)"
            )
        return super().assemble(fn)


def is_generate(fn: Any) -> bool:
    """Whether what a trace calls is `lm.generate`, and not the model's forward pass."""
    return getattr(fn, "__name__", "") == "generate"


def _alike(one: Any, other: Any) -> bool:
    """Whether two settings are certainly equal."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (RuntimeError, ValueError):  # arrays, or objects that hold some
        return False


class Run(DenoisingRun):
    """The result of `lm.generate`: a `DenoisingRun` that explains why a `with` block over it was not traced."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "this run is finished and was not traced: write `with lm.generate(...) as tracer:` literally, "
            "not in a function that returns it, and in a file or a notebook cell, not on stdin (nnsight "
            "reads the source of the block)"
        )

    def __exit__(self, *error: object) -> None: ...

    @classmethod
    def of(cls, run: DenoisingRun) -> "Run":
        """The same run."""
        return cls(**{name.name: getattr(run, name.name) for name in fields(run)})


class TracedRun(RunObserver):
    """The observer that passes every step of a run, and its canvas, to the workers of a trace.

    Args:
        model: the traced network.
        interleaver: the traced model's.
        canvas: nnsight's location of the canvas.
        grad: whether the network's forward passes keep their graphs.
        on_start: called with the run's sampler.
    """

    needs_full_logits = True
    proposes_all = True

    def __init__(
        self,
        model: Any,
        interleaver: Interleaver,
        canvas: str,
        *,
        grad: bool,
        on_start: Callable[[Sampler], None],
    ) -> None:
        self.model, self.interleaver, self.location = model, interleaver, canvas
        self.grad, self.on_start = grad, on_start
        self.now: RunStep | None = None
        self.sampler = Sampler()
        self._forward: Callable[[Tensor], Any] | None = None
        self._clean: Mapping[int, ColumnStats] | None = None
        self.state: dict[str, Tensor] = {}
        self.editable = self.cached = self.going = False

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """A run begins."""
        self.on_start(sampler)
        self.sampler = sampler
        self.editable = not sampler.autoregressive
        self.cached = sampler.autoregressive and sampler.use_cache
        self.state = {"valid": content} if answer is None else {"valid": content, "answer": answer}

    def use_network(self, forward: Callable[[Int[Tensor, "batch position"]], Any]) -> None:
        """Take the run's network, for passes without hooks."""
        self._forward = forward

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins: pass it to the workers that wait for it, then its canvas for reading and editing."""
        state = {
            "answer": self.sampler.attention.within_own_blocks(masked),
            **self.state,
            "tokens": canvas,
            "masked": masked,
        }
        state["valid"] = self.sampler.attention.seen_content(self.state["valid"], masked, plan.span[1])
        share = known_progress(self.sampler, plan, masked, state["answer"])
        state["answer"] = self.sampler.attention.answer_at(state["answer"], masked)
        state |= {} if share is None else {"share": share}
        self._handle(STEP, (plan, state))
        if self.editable:
            edited: Any = self._handle(self.location, canvas)
            if edited is not canvas:
                canvas = _as_canvas(edited, canvas)
        return canvas

    def see(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> None:
        """The canvas of the step after every edit, which hooks see; what is open at the first one is the answer."""
        self.state.setdefault("answer", self.sampler.attention.within_own_blocks(masked))
        attention = self.sampler.attention
        valid = attention.seen_content(self.state["valid"], masked, plan.span[1])
        given = (canvas, masked, valid, attention.answer_at(self.state["answer"], masked))
        share = known_progress(self.sampler, plan, masked, self.state["answer"])
        now = RunStep(plan.index, plan.total, plan.block, plan.span, *given, queries=plan.computed, share=share)
        own = attention.until_block(self.state["valid"], masked, plan.span)
        self.now = now if plan.seen is None else now.until(plan.seen, own)
        self._clean = None

    @torch.no_grad()
    def clean(self) -> Mapping[int, ColumnStats]:
        """What every layer's keys receive on the step's canvas without hooks, in all rows of the network.

        Computed in one more pass, once a step, which is not traced.
        """
        if self._clean is None:
            assert self.now is not None
            assert self._forward is not None
            tracing, self.interleaver.interleaving = self.interleaver.interleaving, False
            try:
                with collecting_columns(self.model, self.now) as columns:
                    self._forward(self.now.tokens)
            finally:
                self.interleaver.interleaving = tracing
            self._clean = columns
        return self._clean

    def stop(self) -> None:
        """The run is over: workers that wait for another step leave their loops."""
        self.close()
        self._handle(STEP, None)

    def close(self) -> None:
        """The run is over, however it ended: no hook sees its canvas from now on."""
        self.now = self._clean = self._forward = None

    def _handle(self, location: str, value: Any) -> Any:
        return self.interleaver.handle(location, value) if self.interleaver.interleaving else value


def _as_canvas(value: Any, canvas: Tensor) -> Tensor:
    """What a trace assigned to the canvas, as a tensor; the loop checks its ids.

    Raises:
        ValueError: it is none, or of another shape.
    """
    with suppress(RuntimeError, TypeError, ValueError):
        assigned = torch.as_tensor(value, device=canvas.device)
        if assigned.shape == canvas.shape:
            return assigned
    raise ValueError(
        f"lm.canvas was assigned {shown(value)}; assign token ids [batch, position], of shape "
        f"{list(canvas.shape)} here"
    )


class LastOfTrace(RunObserver):
    """The last observer of a traced run: shows it the canvas that the trace and the other observers leave."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins."""
        self.run.see(plan, canvas, masked)
        return canvas


class _ShapesOnly:
    """A model whose forward passes run under a fake-tensor mode; every logit is 0."""

    def __init__(self, module: Any, mode: Any) -> None:
        self.module, self.mode = module, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        with self.mode:
            output = self.module(**inputs)
        logits = torch.zeros(tuple(output.logits.shape), device=output.logits.device)
        return SimpleNamespace(logits=logits, past_key_values=returned_cache(output))


def run_or_scan(module: Any, prompt: Any, attention_mask: Any, **settings: Any) -> DenoisingRun:
    """`denoise` with all logits; inside `lm.scan` the network runs on fake tensors.

    The sampler then runs with logits of 0, so that the schedule, the canvases and the sampler's locations are those
    of a run in which every token is equally likely.
    """
    mode = detect_fake_mode()
    # All logits: an edit of lm.sampler.unmasked may then write any masked position.
    settings = {**settings, "logits": "all"}
    if mode is None:
        return denoise(module, prompt, attention_mask, **settings)
    with unset_fake_temporarily():
        return denoise(_ShapesOnly(module, mode), prompt, attention_mask, **settings)
