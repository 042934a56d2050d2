"""Observers of a run: objects that see every step, may replace logits, and can go on from a stored state."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import (
    AttentionInputs,
    ColumnHook,
    ColumnStats,
    Hook,
    PointContext,
    RunStep,
    SinkLayout,
    attach_hooks,
    checked,
    counted_queries,
    hidden_mass,
    hidden_per_map,
    hook_keys,
    hooked_attentions,
    listening,
    stream_columns,
)
from dlm_lens.sampling.denoising_run import History
from dlm_lens.sampling.samplers.base import Proposal, Sampler, StepPlan


@dataclass(frozen=True, eq=False)
class RunState:
    """All that the next step of a run depends on.

    Args:
        canvas: what the finished steps left.
        own: states of the random generators and of the sampler, by name.
        over: no step follows.
        remembers: a hook keeps something of earlier steps, which is not here: such a run cannot go on.
    """

    canvas: Int[Tensor, "batch position"]
    own: Mapping[str, Tensor] = field(default_factory=dict)
    over: bool = False
    remembers: bool = False


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """One step of a run: its plan, what it saw, what it proposed and wrote."""

    plan: StepPlan
    canvas: Int[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    proposal: Proposal
    unmasked: Bool[Tensor, "batch position"]


@dataclass(frozen=True, eq=False)
class Resumption:
    """The finished steps of an unfinished run, and where they left it."""

    steps: tuple[FinishedStep, ...]
    state: RunState

    def enter(self, history: History) -> None:
        """Put the finished steps in front of a run's history.

        Raises:
            ValueError: they are of other prompts or of another length.
        """
        held, wanted = tuple(self.state.canvas.shape), tuple(history.attention_mask.shape)
        if held != wanted:
            raise ValueError(
                f"resume holds canvases {list(held)}, this run has {list(wanted)}; it is another run's"
            )
        for step in self.steps:
            history.start(step.canvas.to(self._device(history)), step.masked.to(self._device(history)))
            proposal = Proposal(*(part.to(self._device(history)) for part in step.proposal))
            history.finish(step.plan, proposal, step.unmasked.to(self._device(history)))

    def canvas(self, history: History) -> Int[Tensor, "batch position"]:
        """The canvas that the next step starts from."""
        return self.state.canvas.to(self._device(history))

    def _device(self, history: History) -> torch.device:
        return history.attention_mask.device


@runtime_checkable
class StateObserver(Protocol):
    """A observer that is also told, behind every step, where the run stands."""

    def keep(self, state: RunState) -> None:
        """The run stands here."""
        ...


class Stateful(Protocol):
    """A part of a run with a state of its own: random generators, a sampler."""

    def state(self) -> dict[str, Tensor]:
        """The state, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        ...


class RunObserver(Protocol):
    """Somebody who follows a run: told of every step, asked for its canvas, told what the step did."""

    @property
    def grad(self) -> bool:
        """Whether the network's forward passes keep their graphs."""
        ...

    @property
    def needs_full_logits(self) -> bool:
        """Whether the model's own forward runs, with all logits, rather than the least that is needed."""
        ...

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins with this sampler (None: AR decoding); `content` is False where there is padding."""
        ...

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas that it shall see, which may be the one given."""
        ...

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
    ) -> None:
        """A step is over: `canvas` is what it left, `unmasked` what it wrote of the proposal."""
        ...

    def stop(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class NetworkObserver(Protocol):
    """A observer that runs the run's network itself, for a pass that is no step."""

    def use_network(self, forward: Callable[[Int[Tensor, "batch position"]], Any]) -> None:
        """Take the network without its head, as the run calls it: guidance and padding included."""
        ...


class StepObserver:
    """A observer that changes nothing and knows the run's present step as a `RunStep`, at `now`.

    `answer` is what was masked at the first step that it was told of, unless somebody sets it behind `start`.

    Args:
        model: the network, whose config and tokenizer the steps carry.
    """

    grad = False
    needs_full_logits = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.now: RunStep | None = None
        self.sampler: Sampler | None = None
        self._content = self.answer = torch.empty(0)
        self._memory: dict[Any, Any] = {}

    def start(self, sampler: Sampler | None, content: Bool[Tensor, "batch position"]) -> None:
        """A run begins."""
        self.sampler, self._content, self._memory = sampler, content, {}
        self.answer = torch.empty(0)

    @property
    def remembers(self) -> bool:
        """Whether a hook has put something into the run's memory."""
        return bool(self._memory)

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; the canvas stays as it is."""
        if not self.answer.numel():
            self.answer = masked
        now = RunStep(
            step=plan.index,
            total=plan.total,
            block=plan.block,
            span=plan.span,
            tokens=canvas,
            masked=masked,
            valid=self._content,
            answer=self.answer,
            config=self.model.config,
            tokenizer=getattr(self.model, "tokenizer", None),
            memory=self._memory,
        )
        # An AR network sees what is written so far.
        self.now = now if self.sampler is not None else now.until(plan.span[0] + plan.index)
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
    ) -> None:
        """A step is over."""

    def stop(self) -> None:
        """The run is over."""
        self.now = None

    def close(self) -> None:
        """The run is over, however it ended: `denoise` calls this also where it raises."""
        self.now = None


@dataclass(frozen=True)
class RunObservers:
    """The observers of a run, and the `parts` of it with a state of their own: generators, the sampler."""

    observers: Sequence[RunObserver] = ()
    parts: Sequence[Stateful] = field(default=())

    @property
    def needs_full_logits(self) -> bool:
        """Whether one of them wants the model's own forward."""
        return any(observer.needs_full_logits for observer in self.observers)

    @property
    def grad(self) -> bool:
        """Whether one of them wants graphs."""
        return any(observer.grad for observer in self.observers)

    def start(self, sampler: Sampler | None, history: History) -> None:
        """A run begins, or goes on behind the steps that its history already has."""
        for observer in self.observers:
            observer.start(sampler, history.attention_mask)
            if history.masked and isinstance(observer, StepObserver):
                observer.answer = history.masked[0]

    def step(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        is_masked: Callable[[Tensor], Bool[Tensor, "batch position"]],
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas as they left it, each having seen what the ones before it did."""
        for observer in self.observers:
            canvas = same_shape("the observer", canvas, observer.step(plan, canvas, is_masked(canvas)))
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
        *,
        over: bool,
        **own: Tensor,
    ) -> None:
        """A step is over; those who keep states are told where the run stands. `own` is what is no part's."""
        for observer in self.observers:
            observer.finish(plan, canvas, proposal, unmasked)
        keepers = [observer for observer in self.observers if isinstance(observer, StateObserver)]
        if keepers:
            for part in self.parts:
                own |= part.state()
            remembers = any(
                isinstance(observer, StepObserver) and observer.remembers for observer in self.observers
            )
            state = RunState(canvas, own, over or plan.index == plan.total - 1, remembers)
            for keeper in keepers:
                keeper.keep(state)

    def stop(self) -> None:
        """The run is over."""
        for observer in self.observers:
            observer.stop()


def same_shape(name: str, before: Tensor, after: object) -> Tensor:
    """What a callback or a observer returned, if it can stand in for `before`.

    Raises:
        ValueError: it is no tensor, of another shape, or not of whole numbers where these are.
    """
    if not isinstance(after, torch.Tensor) or after.shape != before.shape:
        kind = f"a tensor of shape {list(after.shape)}" if isinstance(after, torch.Tensor) else repr(after)
        raise ValueError(f"{name} returned {kind}; it must return None or a tensor of shape {list(before.shape)}")
    plain = not after.is_complex() and after.dtype != torch.bool
    if not plain or after.is_floating_point() != before.is_floating_point():
        kind = "floating-point numbers" if before.is_floating_point() else "token ids"
        raise ValueError(f"{name} returned a tensor of {after.dtype}; it must hold {kind}")
    return after.to(before.device) if before.is_floating_point() else after.to(before.device, before.dtype)


class HookRunner(StepObserver):
    """Attaches hooks to a model for one run; use it as a context around the run.

    A hook that says `needs_clean_pass` finds, at `run.clean()`, what every layer's keys receive in a pass over the
    same canvas without hooks; that pass runs once a step, in front of the real one.

    Args:
        model: from `dlm_lens.load`.
        hooks: what to run.
        forward: runs the network on a canvas as the run does, guidance and padding included.
        record: where to note `columns_hidden` and `mass_hidden` at the end of the run: for every hook how many
            columns it hid per map (`hidden_per_map`) and their share of the attention (`hidden_mass`), None for
            those that hide none, or never asked what columns receive.

    Raises:
        ValueError: something that is no hook, or a model without hook points.
    """

    def __init__(
        self,
        model: Any,
        hooks: Sequence[Hook],
        forward: Callable[[Tensor], Any],
        record: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        self.hooks, self.forward = checked(hooks), forward
        self.record = {} if record is None else record
        self._checked = self._off = False
        self._attached = ExitStack()

    def __enter__(self) -> "HookRunner":
        now = attach_hooks(self.model, *self.hooks, run=lambda: self.now, off=lambda: self._off)
        self._attached.enter_context(now)
        return self

    def __exit__(self, *error: object) -> None:
        self._attached.close()

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins: take the clean statistics, if somebody wants them."""
        canvas = super().step(plan, canvas, masked)
        seen: Any = self.now
        # With guidance the network sees every row twice.
        self.now = seen.for_rows(len(canvas) * (2 if self.sampler is not None and self.sampler.cfg_scale else 1))
        if not self._checked:
            check_hooks(self.hooks, self.now)
            self._checked = True
        if any(hook.needs_clean_pass for hook in self.hooks):
            # Switched off where they are: taken off and put on again, they would stand behind who observes the run.
            self._off = True
            try:
                with collecting_columns(self.model, self.now) as columns:
                    self.forward(seen.tokens)
            finally:
                self._off = False
            self.now = replace(self.now, clean=lambda: columns)
        return canvas

    def stop(self) -> None:
        """The run is over: note what was hidden."""
        if any(isinstance(hook, ColumnHook) for hook in self.hooks):
            self.record.update(hidden_in(self._memory, self.hooks))
        super().stop()


def hidden_in(memory: Mapping[Any, Any], hooks: Sequence[Hook]) -> dict[str, tuple[float | None, ...]]:
    """What the settings of a finished run say of the hooks that hide columns: how many, and their attention."""
    placed = list(zip(hooks, hook_keys(hooks), strict=True))
    return {
        "columns_hidden": tuple(hidden_per_map(memory, hook, place) for hook, place in placed),
        "mass_hidden": tuple(hidden_mass(memory, hook, place) for hook, place in placed),
    }


def check_hooks(hooks: Sequence[Hook], run: RunStep) -> None:
    """Let hooks refuse what this run or its model do not have, before anything is computed (`Hook.check_run`).

    Raises:
        ValueError: a step, a layer or a head that is not there.
    """
    for hook in hooks:
        hook.check_run(run)


@contextmanager
def collecting_columns(model: Any, run: RunStep) -> Iterator[Mapping[int, ColumnStats]]:
    """Collect what the keys of every layer receive in the forward passes inside the block, without patterns."""
    columns: dict[int, ColumnStats] = {}
    sinks = SinkLayout.of(model)

    def read(inputs: AttentionInputs) -> None:
        context = PointContext("", inputs.layer, sinks, run=run)
        keys = inputs.k.shape[2]
        queries = counted_queries(len(inputs.q), keys, keys, context, inputs.q.device)[:, inputs.own]
        columns[inputs.layer] = stream_columns(inputs, queries)

    modules = hooked_attentions(model)
    with listening(model):
        before = [module.hook_z.readers for module in modules]
        for module in modules:
            # Whoever records the run is not told of this pass.
            module.hook_z.readers = (read,)
        try:
            yield columns
        finally:
            for module, readers in zip(modules, before, strict=True):
                module.hook_z.readers = readers
