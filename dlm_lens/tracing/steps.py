"""`tracer.steps`: a loop over denoising steps inside a trace."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any, NoReturn, cast

from jaxtyping import Bool, Float, Int
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from torch import Tensor

from dlm_lens.attention import RunStep
from dlm_lens.sampling import StepPlan

logger = logging.getLogger(__name__)

RESULT = "result"
"""nnsight's location of the traced call's result."""

STEP = "step"
"""Our location of the run: handled when a step begins, and once more, with None, when the run is over."""


class Step(int):
    """The index of a denoising step, with the state of the run before it; in an invoke, of its own rows.

    Args:
        plan: block and total of the step.
        state: "tokens", "masked", "valid" and "answer", in an AR run "share", as in a `RunStep`.
        memory: what hooks store from step to step.

    Attributes:
        total: steps of the run, T; the most that it can have, where it may end early.
        block: index of the block being decoded.
        span: the block, as a slice of canvas positions.
        tokens: the canvas x_t that the step starts from, `[batch, position]`.
        masked: which of its positions are open (masked, or holding a random token), `[batch, position]`.
        open: the same.
        valid: which of its positions are content rather than padding, `[batch, position]`.
    """

    total: int
    block: int
    span: slice
    tokens: Int[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    valid: Bool[Tensor, "batch position"]
    _given: tuple[StepPlan, dict[str, Tensor], dict[Any, Any]]
    _seen: RunStep | None

    def __new__(cls, plan: StepPlan, state: dict[str, Tensor], memory: dict[Any, Any] | None = None) -> "Step":
        """Build the step of a plan; an int is made in `__new__`."""
        self = int.__new__(cls, plan.index)
        self.total, self.block, self.span = plan.total, plan.block, slice(*plan.span)
        self.tokens, self.masked, self.valid = state["tokens"], state["masked"], state["valid"]
        self._given = plan, state, {} if memory is None else memory
        self._seen = None
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What a copy or a file has: the state of the run, not what hooks stored, which may be functions."""
        plan, state, _ = self._given
        return Step, (plan, state)

    @cached_property
    def run(self) -> RunStep:
        """The same as the type that hooks receive."""
        plan, state, memory = self._given
        return RunStep(
            plan.index,
            plan.total,
            plan.block,
            plan.span,
            self.tokens,
            self.masked,
            self.valid,
            state["answer"],
            queries=plan.computed,
            memory=memory,
            share=state.get("share"),
        )

    def seen(self, now: RunStep, rows: Int[Tensor, "row"] | None) -> RunStep:
        """The step as its forward pass sees it, on the canvas that the trace and the run's observers leave.

        Args:
            now: the run's present step, of all rows of the batch.
            rows: those of the invoke; None for all.
        """
        if self._seen is None:
            own = now if rows is None else now.of_rows(rows)
            self._seen = replace(own, memory=self._given[2])
        return self._seen

    @property
    def open(self) -> Bool[Tensor, "batch position"]:
        """`masked`, by the word that fits models without a mask token too."""
        return self.masked

    @property
    def progress(self) -> Float[Tensor, "batch"]:
        """Share of the positions that were open at the start of the run that are decided."""
        return self.run.progress

    @property
    def index(self) -> int:
        """The step as an int."""
        return int(self)

    def __repr__(self) -> str:
        return f"Step({int(self)} of {self.total}, block {self.block}, {int(self.masked.sum())} masked)"


StepKey = int | slice | Sequence[int] | Callable[[Step], Any]


def _checked(key: Any) -> StepKey:
    """The key with Python ints for whole numbers of numpy and torch.

    Raises:
        TypeError: the key is no index.
    """
    if callable(key) or isinstance(key, slice):
        return cast(StepKey, key)
    try:
        return index(key)
    except TypeError:
        if isinstance(key, Iterable) and not isinstance(key, str):
            return [index(each) for each in key]
    raise TypeError(f"steps[{key!r}]: give a whole number, a slice, or a list of whole numbers")


@dataclass
class _LoopState:
    """State of a worker's loops: the last step it received, whether it is in a loop's body, its hooks' memory.

    `ticks` counts the steps that began, which in a resumed run are fewer than the index of the next one; `total` is
    that of the last step.
    """

    at: int = -1
    ticks: int = 0
    total: int = 0
    inside: bool = False
    over: bool = False
    memory: dict[Any, Any] = field(default_factory=dict)


def loop_state(worker: Any) -> _LoopState:
    """The loop state of a worker greenlet, made on first use."""
    if not hasattr(worker, "dlm_loop_state"):
        worker.dlm_loop_state = _LoopState()
    state: _LoopState = worker.dlm_loop_state
    return state


def _wanted(location: str) -> int:
    """Nnsight's `Mediator.wanted` for a worker with steps: a value of a step is read only inside the loop.

    After a loop, the run is still in the step in which the loop ended. Which of its values can still be read would
    depend on what the loop's body read, so that all are refused.

    Raises:
        OutOfOrderError: a value of a step is read after the loop.
    """
    mediator = Mediator.current(location)
    loop = loop_state(mediator.worker)
    if loop.at >= 0 and not loop.inside and mediator.iteration == 0 and location not in (STEP, RESULT):
        raise OutOfOrderError(
            f"{location!r} was read after the loop over steps, which ended in step {loop.at}; read a value of a "
            "step inside `for step in tracer.steps[...]`, or in another tracer.invoke(); after the loop only "
            "tracer.result can be read"
        )
    return Mediator.wanted(mediator, location)


@dataclass(frozen=True)
class Steps:
    """The steps that a loop of a trace visits, in the order in which they run.

    `tracer.steps` visits every remaining step. `steps[...]` takes an index, a slice or a list of indices (negative
    from the end); `steps.where(predicate)` takes the steps whose `Step` the predicate accepts. The body reads and
    edits values in the order in which the model computes them. Code after the loop runs; a second loop visits
    later steps.

    How many steps a run has can depend on its tokens (an end of the text, parallel decoding), and is known only
    after the last one. Indices are those of the longest run. Where a run ends before one of them, or before the end
    from which negative ones count, the loop raises an IndexError after the last step.
    """

    key: StepKey = field(default_factory=lambda: slice(None))

    def __getitem__(self, key: StepKey) -> "Steps":
        return Steps(_checked(key))

    def where(self, predicate: Callable[[Step], Any]) -> "Steps":
        """The steps for which `predicate(step)` is true, decided when the step begins."""
        if not callable(predicate):
            raise TypeError(f"where takes a function of a Step, not {predicate!r}; give indices as steps[...]")
        return Steps(predicate)

    def __enter__(self) -> NoReturn:
        raise TypeError("steps are looped over: `for step in tracer.steps[...]:` instead of `with`")

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[Step]:
        mediator = Mediator.current("tracer.steps")
        mediator.wanted = _wanted
        loop, previous, first, total = loop_state(mediator.worker), mediator.iteration, True, 0
        wanted: Sequence[int] | None = ()
        last = -1
        try:
            while True:
                step = self._next(mediator, loop)
                if step is None:
                    if first:
                        self._check_left(loop)
                    self._check_end(loop.at + 1, total)
                    return
                if step.total != total:
                    total, wanted = step.total, self._indices(step.total)
                    last = max(wanted or (-1,))
                if first and wanted is not None:
                    self._check_ahead(wanted, int(step), total)
                first = False
                if self._accepts(step) if wanted is None else int(step) in wanted:
                    loop.inside = True
                    yield step
                    self._check_body(mediator, loop, step)
                if wanted is not None and step >= last:
                    return
        finally:
            loop.inside, mediator.iteration = False, previous

    def _next(self, mediator: Mediator, loop: _LoopState) -> Step | None:
        """Wait until the next step begins; None when the run is over."""
        if loop.over:
            raise OutOfOrderError(
                "tracer.steps has no more steps, because the run is over: visit steps in increasing order, or in "
                "another tracer.invoke()"
            )
        # The step is awaited by the number of its occurrence; inside the step, values are those that come next.
        occurrence = mediator.iteration = max(loop.ticks, mediator.occurrence(STEP))
        tick = Mediator.value(STEP)
        mediator.iteration, loop.ticks = None, occurrence + 1
        if tick is None:
            loop.over = True
            return None
        plan, state = tick
        step = Step(plan, state, loop.memory)
        loop.at, loop.total = int(step), step.total
        return step

    def _accepts(self, step: Step) -> bool:
        """Whether the predicate is true for a step.

        Raises:
            ValueError: it returned a tensor of several truth values, one for each row.
        """
        assert callable(self.key)
        found = self.key(step)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise ValueError(
                f"the function of tracer.steps.where returned a tensor of shape {list(found.shape)}, and a step is "
                "visited in all rows of the batch or in none: return one truth value, such as "
                "bool((s.progress >= 0.5).all())"
            )
        return bool(found)

    def _indices(self, total: int) -> Sequence[int] | None:
        """The steps that are requested by index; None for a predicate."""
        if callable(self.key):
            return None
        if isinstance(self.key, slice):
            return range(total)[self.key]
        keys = [self.key] if isinstance(self.key, int) else self.key
        for key in keys:
            if not -total <= key < total:
                raise IndexError(f"step {key} does not exist: this run has {total} steps, 0 to {total - 1}")
        return [range(total)[key] for key in keys]

    def _check_ahead(self, wanted: Sequence[int], step: int, total: int) -> None:
        """Refuse a first step that is over, and warn where none of the run's steps was requested."""
        if not wanted:
            logger.warning(
                "tracer.steps[%s] visits no step: the run has steps 0 to %d, and none of these",
                self._text,
                total - 1,
            )
        elif min(wanted) < step and not self._every:
            raise OutOfOrderError(
                f"tracer.steps requests step {min(wanted)}, but the run is at step {step} already: visit steps in "
                "increasing order, or in another tracer.invoke()"
            )

    def _check_left(self, loop: _LoopState) -> None:
        """Refuse a loop that begins when the run is over, and requests steps that it had or never had.

        Raises:
            IndexError: the run never had such a step.
            OutOfOrderError: it had, and a loop before this one ended after it.
        """
        wanted = self._indices(loop.total) if loop.total else None
        if wanted and min(wanted) <= loop.at and not self._every:
            raise OutOfOrderError(
                f"tracer.steps requests step {min(wanted)}, but the run is over, and the loop before this one "
                f"ended in step {loop.at}: visit steps in increasing order, or in another tracer.invoke()"
            )
        self._check_end(loop.at + 1, loop.total)

    @property
    def _every(self) -> bool:
        """Whether these are all remaining steps."""
        return isinstance(self.key, slice) and self.key == slice(None)

    @property
    def _text(self) -> str:
        """The key as it was written, or nearly."""
        key = self.key
        if not isinstance(key, slice):
            return str(key)
        parts = [key.start, key.stop] + ([] if key.step is None else [key.step])
        return ":".join("" if part is None else str(part) for part in parts)

    def _check_end(self, steps: int, total: int) -> None:
        """Refuse indices that a run which ended early did not reach, or that count from its latest possible end."""
        if callable(self.key) or steps >= total:
            return
        if isinstance(self.key, slice):
            missed = any(bound is not None and bound < 0 for bound in (self.key.start, self.key.stop))
        else:
            missed = max(self._indices(total) or (0,)) >= steps
        if missed:
            raise IndexError(
                f"tracer.steps[{self._text}] counts {total} steps, but this run ended after {steps}, which "
                "depended on its tokens: run it once with dl.denoise, and give indices below its .steps"
            )

    def _check_body(self, mediator: Mediator, loop: _LoopState, step: Step) -> None:
        """Refuse a body after which the run is at a later step.

        Raises:
            OutOfOrderError: it read values out of order, or had a loop over later steps.
        """
        loop.inside = False
        if loop.at > step:
            raise OutOfOrderError(
                f"the body of step {int(step)} holds a loop over steps that went on to step {loop.at}, so that the "
                "outer loop would leave steps out: write one loop after the other, or leave the outer one (break)"
            )
        if mediator.occurrence(STEP) > loop.ticks:
            raise OutOfOrderError(
                f"the body of step {int(step)} read a value that the model had already passed, and got that of a "
                "later step: inside a step, read in the order in which the model runs (lm.canvas, layers from "
                "first to last, lm.lm_head, lm.sampler); read tracer.result after the loop"
            )
