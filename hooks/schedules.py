"""Schedules of hooks: a weight that depends on how far a row of the run is."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dlm_lens.attention import PointContext, run_of

Schedule = Callable[[float], float] | tuple[float, float] | float | None
"""The weight w, from a row's progress: a function, (lo, hi) for a straight line, a number, or None for 1."""


def check_schedule(schedule: Any, who: str) -> None:
    """Check that this is a schedule.

    Raises:
        ValueError: it is none.
    """
    number = isinstance(schedule, int | float) and not isinstance(schedule, bool)
    pair = isinstance(schedule, tuple) and len(schedule) == 2
    if not (schedule is None or number or pair or callable(schedule)):
        raise ValueError(f"{who}: schedule is {schedule!r}; give (lo, hi), a number, or a function of progress")


def shown_schedule(schedule: Schedule | Callable[..., Any]) -> str:
    """A schedule, or another function, in a hook's repr: a function's own has an address."""
    return getattr(schedule, "__name__", type(schedule).__name__) if callable(schedule) else repr(schedule)


def weights_of(schedule: Schedule, tensor: Tensor, hook: PointContext, who: Any) -> tuple[float, ...]:
    """The weight w of every row of an activation; one number if it is the same for all rows.

    Raises:
        ValueError: a schedule over progress outside a run.
    """
    schedule = 1.0 if schedule is None else schedule
    if isinstance(schedule, int | float):
        return (float(schedule),)
    run = run_of(hook, who).for_rows(len(tensor))
    progress: list[float] = run.once("progress", lambda: run.progress.tolist())
    if isinstance(schedule, tuple):
        lo, hi = schedule
        return tuple(lo + (hi - lo) * share for share in progress)
    return tuple(float(schedule(share)) for share in progress)


def spread_weights(weights: Sequence[float], tensor: Tensor, hook: PointContext) -> Tensor:
    """The weights w of the rows with as many axes as the activation; copied to its device once a step."""
    if len(set(weights)) == 1:
        return tensor.new_full([1] * tensor.ndim, weights[0])

    def made() -> Tensor:
        return tensor.new_tensor(weights).reshape(-1, *[1] * (tensor.ndim - 1))

    if hook.run is None:
        return made()
    found: Tensor = hook.run.once(("shares", tuple(weights), tensor.device, tensor.dtype, tensor.ndim), made)
    return found
