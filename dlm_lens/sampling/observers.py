"""Observers of a run: `RunObserver`, the state that a run is resumed from, and the observer that runs hooks."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import (
    AttentionInputs,
    ColumnHook,
    ColumnStats,
    Hook,
    HookLike,
    PointContext,
    RunStep,
    SinkLayout,
    attach_hooks,
    attention_stack,
    checked,
    counted_queries,
    hooked_attentions,
    listening,
    refuse_row_lists,
    stream_columns,
)
from dlm_lens.attention.model_access import lock_of
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.history import History
from dlm_lens.sampling.moved_tokens import share_of_text
from dlm_lens.sampling.run_checks import check_hooks, hidden_in, warn_of_steps_not_reached
from dlm_lens.sampling.samplers.base import Sampler
from dlm_lens.shapes import same_shape


@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that the next step of a run depends on.

    Args:
        canvas: the canvas after the finished steps.
        own: states of the random generators and of the sampler, by name.
        over: no step follows.
        remembers: a hook keeps values of earlier steps, which are not stored here: such a run cannot be resumed.
    """

    canvas: Int[Tensor, "batch position"]
    own: Mapping[str, Tensor] = field(default_factory=dict)
    over: bool = False
    remembers: bool = False


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """One step of a run: its plan, the canvas that it saw, its proposal and what it unmasked and revised.

    `masked` are the open positions of that canvas. `revised` is None if the step rewrote no decided position, and
    `origins` (`DenoisingRun.origins`) where nothing moves.
    """

    plan: StepPlan
    canvas: Int[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    proposal: Proposal
    unmasked: Bool[Tensor, "batch position"]
    revised: Bool[Tensor, "batch position"] | None = None
    origins: Int[Tensor, "batch position"] | None = None


@dataclass(frozen=True, eq=False)
class Resumption:
    """The finished steps of an unfinished run, and the state after them."""

    steps: tuple[FinishedStep, ...]
    state: RunState

    def enter(self, history: History) -> None:
        """Add the finished steps to an empty history.

        Raises:
            ValueError: they are of other prompts or of another length.
        """
        stored, expected = tuple(self.state.canvas.shape), tuple(history.attention_mask.shape)
        if stored != expected:
            raise ValueError(
                f"resume holds canvases {list(stored)}, this run has {list(expected)}; it is another run's"
            )
        for step in self.steps:
            history.start(step.canvas.to(self._device(history)), step.masked.to(self._device(history)))
            proposal = Proposal(*(part.to(self._device(history)) for part in step.proposal))
            given = (step.unmasked, step.revised, step.origins)
            others: list[Any] = [None if each is None else each.to(self._device(history)) for each in given]
            history.finish(step.plan, proposal, *others)

    def canvas(self, history: History) -> Int[Tensor, "batch position"]:
        """The canvas that the next step starts from."""
        return self.state.canvas.to(self._device(history))

    def _device(self, history: History) -> torch.device:
        return history.attention_mask.device


class Stateful(Protocol):
    """A part of a run with a state of its own: random generators, a sampler."""

    def state(self) -> dict[str, Tensor]:
        """The state, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        ...


class RunObserver:
    """Base class of the objects that follow a run: `denoise(observers=...)` calls their methods in this order.

    `use_network` once, `start` once, `step` and `finish` (and `keep`) at every step, `stop` after the last step,
    `close` however the run ends. The base class's methods do nothing.

    Attributes:
        grad: the network's forward passes keep their graphs.
        needs_full_logits: the model's own forward runs, with all logits, instead of as little as the sampler needs.
        whole_prefix: in AR decoding, every step computes the whole prefix, without a cache.
        proposes_all: the sampler proposes for every position that it evaluates, also where it would unmask nothing,
            because the observer may choose other positions.
        keeps_state: `keep` is called after every step.
        step_hooks: hooks that the observer runs, which may refuse the run's steps before the first
            (`Hook.check_steps`).
        share: in reruns, `DenoisingRun.progress` of the step that begins; None where its canvas shows it.
    """

    grad: bool = False
    needs_full_logits: bool = False
    whole_prefix: bool = False
    proposes_all: bool = False
    keeps_state: bool = False
    step_hooks: Sequence[Hook] = ()
    share: Float[Tensor, "batch"] | None = None

    @property
    def remembers(self) -> bool:
        """Whether hooks keep values of earlier steps in this observer, which no `RunState` holds."""
        return False

    def use_network(self, forward: Callable[[Int[Tensor, "batch position"]], Any]) -> None:
        """Get the run's network without its head, guidance and padding included, for passes that are no steps."""

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """A run begins.

        Args:
            sampler: of the run.
            content: False where there is padding.
            answer: what was open when the run began, if it continues after earlier steps; None if the first step
                is still to come.
        """

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas that it sees: the one given, or (except in AR decoding) another.

        The one given is a copy. `masked` are its open positions, whether they hold [MASK] or not.
        """
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
    ) -> None:
        """A step is over: `canvas` is the next one, `unmasked` the open positions that took over the proposal.

        A sampler that edits or renoises also rewrites decided positions (`history.revised_positions`).
        """

    def keep(self, state: RunState) -> None:
        """The state of the run after the step, from which it can be resumed."""

    def stop(self) -> None:
        """The run is over."""

    def close(self) -> None:
        """The run is over, however it ended: `denoise` calls this also where it raises."""


class StepObserver(RunObserver):
    """An observer that changes nothing and has the run's present step as a `RunStep`, at `now`.

    `answer` is what was open at the first step.

    Args:
        model: the network, whose config and tokenizer the steps carry.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._lock, self._calls = lock_of(model), -1
        self.now: RunStep | None = None
        self.sampler: Sampler = Sampler()
        self._content = self.answer = torch.empty(0)
        self._memory: dict[Any, Any] = {}

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """A run begins."""
        self.sampler, self._content, self._memory = sampler, content, {}
        self.answer = torch.empty(0) if answer is None else answer

    @property
    def elsewhere(self) -> bool:
        """Whether the model is in a call that began since the run's last step did, as a `denoise` in `on_canvas`.

        Its passes are not the run's: hooks and recorders of the run leave them out.
        """
        return self._lock is not None and self._lock.calls > self._calls

    @property
    def remembers(self) -> bool:
        """Whether a hook has put something into the run's memory."""
        return bool(self._memory)

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; the canvas stays as it is."""
        self._calls = 0 if self._lock is None else self._lock.calls
        if not self.answer.numel():
            self.answer = self.sampler.attention.within_own_blocks(masked)
        now = RunStep(
            step=plan.index,
            total=plan.total,
            block=plan.block,
            span=plan.span,
            tokens=canvas,
            masked=masked,
            valid=self.sampler.attention.seen_content(self._content, masked, plan.span[1]),
            answer=self.sampler.attention.answer_at(self.answer, masked),
            queries=plan.computed,
            config=self.model.config,
            tokenizer=getattr(self.model, "tokenizer", None),
            memory=self._memory,
            share=known_progress(self.sampler, plan, masked, self.answer) if self.share is None else self.share,
            alike=self.sampler.attends_alike(self.model.config),
        )
        own = self.sampler.attention.until_block(self._content, masked, plan.span)
        self.now = now if plan.seen is None else now.until(plan.seen, own)
        return canvas

    def stop(self) -> None:
        """The run is over."""
        self.now = None

    def close(self) -> None:
        """The run is over, however it ended."""
        self.now = None


def known_progress(
    sampler: Sampler, plan: StepPlan, masked: Bool[Tensor, "batch position"], answer: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch"] | None:
    """`RunStep.share` of an AR run, step / total, and of a run with room; None where it is that of the answer."""
    if sampler.autoregressive:
        return torch.full((len(masked),), plan.index / plan.total, device=masked.device)
    room = sampler.attention.room
    return None if room is None else share_of_text(masked, answer, room.to(masked.device))


@dataclass(frozen=True)
class RunObservers:
    """The observers of a run, and the `parts` of it with a state of their own: generators, the sampler."""

    observers: Sequence[RunObserver] = ()
    parts: Sequence[Stateful] = field(default=())

    @property
    def needs_full_logits(self) -> bool:
        """Whether one of them needs the model's own forward."""
        return any(observer.needs_full_logits for observer in self.observers)

    @property
    def grad(self) -> bool:
        """Whether one of them needs graphs."""
        return any(observer.grad for observer in self.observers)

    @property
    def proposes_all(self) -> bool:
        """Whether one of them may choose other positions than the sampler."""
        return any(observer.proposes_all for observer in self.observers)

    def start(self, sampler: Sampler, history: History) -> None:
        """A run begins, or continues after the steps that its history already has."""
        for observer in self.observers:
            answer = sampler.attention.within_own_blocks(history.masked[0]) if history.masked else None
            observer.start(sampler, history.attention_mask, answer)

    def step(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        opened: Callable[[Tensor], Bool[Tensor, "batch position"]],
        *,
        editable: bool = True,
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas after the edits of every observer, in place on its copy or of another.

        Raises:
            ValueError: an observer returned no canvas, or edited one that is not `editable`.
        """
        for observer in self.observers:
            edited = same_shape("the observer", canvas, observer.step(plan, canvas.clone(), opened(canvas)))
            if edited.equal(canvas):
                continue
            if not editable:
                raise ValueError(
                    f"{type(observer).__name__} edited the canvas at step {plan.index}; an AR model has no canvas "
                    "to edit: use on_logits to choose another token"
                )
            canvas = edited.clone()  # the observer may write those of later steps into the tensor that it returned
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
        *,
        over: bool,
    ) -> None:
        """A step is over; the observers that keep states get that of the run."""
        for observer in self.observers:
            observer.finish(plan, canvas.clone(), proposal, unmasked)
        keepers = [observer for observer in self.observers if observer.keeps_state]
        if keepers:
            own = {name: value for part in self.parts for name, value in part.state().items()}
            state = RunState(canvas, own, over, any(observer.remembers for observer in self.observers))
            for keeper in keepers:
                keeper.keep(state)

    def stop(self) -> None:
        """The run is over."""
        for observer in self.observers:
            observer.stop()


class HookRunner(StepObserver):
    """Attaches hooks to a model for one run; use it as a context around the run.

    For a hook with `needs_clean_pass`, `run.clean()` gives what every layer's keys receive in a pass over the same
    canvas without hooks; that pass runs once a step, before the real one.

    Args:
        model: from `dlm_lens.load`.
        hooks: the interventions.
        forward: runs the network on a canvas as the run does, guidance and padding included.
        record: where to note `columns_hidden` and `mass_hidden` at the end of the run: for every hook how many
            columns it hid per map (`hidden_per_map`) and their share of the attention (`hidden_mass`), None for
            hooks that hide none, or that did not read what columns receive.
        halves: how often a pass sees every row; None for as often as the run's sampler.

    Raises:
        ValueError: a hook that is none or acts in an encoder that the model lacks, or a model without hook points.
    """

    def __init__(
        self,
        model: Any,
        hooks: Sequence[HookLike],
        forward: Callable[[Tensor], Any],
        record: MutableMapping[str, Any] | None = None,
        halves: int | None = None,
    ) -> None:
        super().__init__(model)
        self.hooks, self.forward, self.halves = checked(hooks), forward, halves
        for hook in self.hooks:
            attention_stack(model, hook.stack)
        self.record = {} if record is None else record
        self._checked = self._off = False
        self._attached = ExitStack()

    def __enter__(self) -> "HookRunner":
        now = attach_hooks(self.model, *self.hooks, run=lambda: self.now, off=lambda: self._off or self.elsewhere)
        self._attached.enter_context(now)
        return self

    def __exit__(self, *error: object) -> None:
        self._attached.close()

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins: compute the clean statistics if a hook needs them."""
        canvas = super().step(plan, canvas, masked)
        seen: Any = self.now
        # With guidance the network sees every row twice.
        self.now = seen.for_rows(len(canvas) * (self.halves or self.sampler.halves))
        if not self._checked:
            other = [hook for hook in self.hooks if hook.row_count != len(canvas)]
            refuse_row_lists(other, f"the run has {len(canvas)}; give a list for each row")
            check_hooks(self.hooks, self.now)
            self._checked = True
        if any(hook.needs_clean_pass for hook in self.hooks):
            # Switched off in place: removed and attached again, they would run after the hooks of other observers.
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
        warn_of_steps_not_reached(self.hooks, self.now)
        super().stop()


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
            # Recorders of the run do not read this pass.
            module.hook_z.readers = (read,)
        try:
            yield columns
        finally:
            for module, readers in zip(modules, before, strict=True):
                module.hook_z.readers = readers
