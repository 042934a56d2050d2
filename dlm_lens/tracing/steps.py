"""`tracer.steps`: the denoising step as the thing that a trace loops over."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NoReturn, cast

from jaxtyping import Bool, Float, Int
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from torch import Tensor

from dlm_lens.attention import RunStep
from dlm_lens.sampling import StepPlan

RESULT = "result"
"""nnsight's location of what the traced call returned."""

STEP = "step"
"""The run-level location that is handled when a step begins, and once more (with None) when the run is over."""


class Step(int):
    """The index of a denoising step, and where the run stands before it; of a traced invoke, its own rows.

    Args:
        plan: block and total of the step.
        state: "tokens", "masked", "valid" and "answer": what a `RunStep` has under these names.
        memory: what hooks remember from step to step.

    Attributes:
        total: steps of the run, T.
        block: index of the block being decoded.
        span: the block, as a slice of canvas positions.
        tokens: the canvas x_t that the step starts from, `[batch, position]`.
        masked: which of its positions are masked (not yet written), `[batch, position]`.
        valid: which of its positions are content rather than padding, `[batch, position]`.
        progress: share of the masks at the start of the run that are written, `[batch]`.
        run: the same as a `RunStep`, which is what hooks are told.
    """

    total: int
    block: int
    span: slice
    tokens: Int[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    valid: Bool[Tensor, "batch position"]
    progress: Float[Tensor, "batch"]
    run: RunStep

    def __new__(cls, plan: StepPlan, state: dict[str, Tensor], memory: dict[Any, Any] | None = None) -> "Step":
        """The step of a plan; an int is made here."""
        self = int.__new__(cls, plan.index)
        self.total, self.block, self.span = plan.total, plan.block, slice(*plan.span)
        self.tokens, self.masked, self.valid = state["tokens"], state["masked"], state["valid"]
        self.progress = 1 - self.masked.sum(-1) / state["answer"].sum(-1).clamp(min=1)
        self.run = RunStep(
            plan.index,
            plan.total,
            plan.block,
            plan.span,
            state["tokens"],
            state["masked"],
            state["valid"],
            state["answer"],
            memory={} if memory is None else memory,
        )
        return self

    @property
    def index(self) -> int:
        """The step as a plain number."""
        return int(self)

    def __repr__(self) -> str:
        return f"Step({int(self)} of {self.total}, block {self.block}, {int(self.masked.sum())} masked)"


Key = int | slice | Sequence[int] | Callable[[Step], Any]


def _checked(key: Any) -> Key:
    """The key with Python's own whole numbers: those of numpy and torch index steps as well.

    Raises:
        TypeError: something that is no index.
    """
    if callable(key) or isinstance(key, slice):
        return cast(Key, key)
    try:
        return index(key)
    except TypeError:
        if isinstance(key, Iterable) and not isinstance(key, str):
            return [index(each) for each in key]
    raise TypeError(f"steps[{key!r}]: give a whole number, a slice, or a list of whole numbers")


@dataclass
class _Place:
    """How far a worker has come: the step it was told of, whether it is in a step's body, its hooks' memory."""

    at: int = -1
    inside: bool = False
    over: bool = False
    memory: dict[Any, Any] = field(default_factory=dict)


def place_of(worker: Any) -> _Place:
    """The place of a worker greenlet, made on first use."""
    if not hasattr(worker, "dlm_place"):
        worker.dlm_place = _Place()
    place: _Place = worker.dlm_place
    return place


def _wanted(location: str) -> int:
    """Nnsight's `Mediator.wanted` for a worker with steps: a value of a step is read inside the loop only.

    The worker stands in the middle of the step that its last loop ended in. Whether that step still has a value to
    come would depend on what the loop's body read.

    Raises:
        OutOfOrderError: a value of a step, after the loop.
    """
    mediator = Mediator.current(location)
    place = place_of(mediator.worker)
    if place.at >= 0 and not place.inside and mediator.iteration == 0 and location not in (STEP, RESULT):
        raise OutOfOrderError(
            f"{location!r} was asked for after the loop over steps, which ended in step {place.at}; a value of a "
            "step is read inside `for step in tracer.steps[...]`, or in another tracer.invoke(); after the loop "
            "there is tracer.result"
        )
    return Mediator.wanted(mediator, location)


@dataclass(frozen=True)
class Steps:
    """The steps that a loop of a trace visits, in the order in which they run.

    `tracer.steps` goes over every step from here on; `steps[...]` takes an index, a slice or a list of indices
    (negative from the end), `steps.where(predicate)` those whose `Step` it accepts. Inside the body, values are
    read and edited in the order in which the model reaches them; code behind the loop runs. A second loop asks for
    later steps.
    """

    key: Key = field(default_factory=lambda: slice(None))

    def __getitem__(self, key: Key) -> "Steps":
        return Steps(_checked(key))

    def where(self, predicate: Callable[[Step], Any]) -> "Steps":
        """The steps for which `predicate(step)` is true, decided when the step begins."""
        if not callable(predicate):
            raise TypeError(f"where takes a function of a Step, not {predicate!r}; indices go in steps[...]")
        return Steps(predicate)

    def __enter__(self) -> NoReturn:
        raise TypeError("steps are looped over: `for step in tracer.steps[...]:` instead of `with`")

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[Step]:
        mediator = Mediator.current("tracer.steps")
        mediator.wanted = _wanted
        place, previous, first = place_of(mediator.worker), mediator.iteration, True
        try:
            while True:
                step = self._next(mediator, place)
                if step is None:
                    return
                wanted = self._indices(step.total)
                if first and wanted:
                    self._check_ahead(min(wanted), step)
                first = False
                if self.key(step) if callable(self.key) else int(step) in (wanted or ()):
                    place.inside = True
                    yield step
                    self._check_body(mediator, place, step)
                if wanted is not None and (not wanted or step >= max(wanted)):
                    return
        finally:
            place.inside, mediator.iteration = False, previous

    def _next(self, mediator: Mediator, place: _Place) -> Step | None:
        """Park until the next step begins; None when the run is over."""
        if place.over:
            raise OutOfOrderError(
                "tracer.steps was asked for more steps, but the run is over: ask in increasing order, or in "
                "another tracer.invoke()"
            )
        # Pinned to an occurrence of the step's own location; within the step, requests follow the model.
        mediator.iteration = max(place.at + 1, mediator.occurrence(STEP))
        tick = Mediator.value(STEP)
        mediator.iteration = None
        if tick is None:
            place.over = True
            return None
        plan, state = tick
        step = Step(plan, state, place.memory)
        place.at = int(step)
        return step

    def _indices(self, total: int) -> Sequence[int] | None:
        """The steps asked for by index; None for a predicate."""
        if callable(self.key):
            return None
        if isinstance(self.key, slice):
            return range(total)[self.key]
        keys = [self.key] if isinstance(self.key, int) else self.key
        for key in keys:
            if not -total <= key < total:
                raise IndexError(f"step {key} is not there: this run has {total} steps, 0 to {total - 1}")
        return [range(total)[key] for key in keys]

    def _check_ahead(self, earliest: int, step: Step) -> None:
        whole = isinstance(self.key, slice) and self.key == slice(None)
        if earliest < step and not whole:
            raise OutOfOrderError(
                f"tracer.steps was asked for step {earliest}, but the run is at step {int(step)} already: ask in "
                "increasing order, or in another tracer.invoke()"
            )

    def _check_body(self, mediator: Mediator, place: _Place, step: Step) -> None:
        place.inside = False
        if mediator.occurrence(STEP) > step + 1:
            raise OutOfOrderError(
                f"the body of step {int(step)} asked for a value that the model had already passed, and got one of "
                "a later step: inside a step, read in the order in which the model runs (lm.canvas, layers from "
                "first to last, lm.lm_head, lm.sampler); read tracer.result behind the loop"
            )
