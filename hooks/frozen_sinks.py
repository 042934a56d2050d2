"""`freeze_sinks`: hide, from a step on, the columns that were sinks at that step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_lens.arguments import is_whole, store_plain_numbers
from dlm_lens.attention import (
    ColumnMask,
    ColumnStats,
    DelegatingColumnHook,
    HookKey,
    PointContext,
    RunStep,
    Stage,
    run_of,
)
from dlm_lens.hooks.base import makes_hook
from dlm_lens.hooks.limits import Limited, at_steps
from dlm_lens.hooks.position_masking import mask_positions
from dlm_lens.hooks.positions import Position
from dlm_lens.hooks.sink_masking import MaskSinks, mask_sinks
from dlm_lens.hooks.sink_sources import grown
from dlm_lens.printable import shown
from dlm_lens.sinks import Detector


@dataclass(frozen=True, repr=False)
class FreezeSinks(DelegatingColumnHook):
    """Hide, from `step` on, the columns that were sinks at `step`; build it with `freeze_sinks`."""

    sinks: MaskSinks
    step: int

    stateless = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        if not is_whole(self.step):
            raise ValueError(f"freeze_sinks: step is {shown(self.step)}; it must be a whole number")

    def __repr__(self) -> str:
        inside = repr(self.sinks).removeprefix("mask_sinks(").removesuffix(")")
        return f"freeze_sinks({inside}, step={self.step})"

    @property
    def stage(self) -> Stage:
        """That of the mask."""
        return self.sinks.stage

    @property
    def inner(self) -> MaskSinks:
        """The hook that finds the sinks."""
        return self.sinks

    def first_step(self, total: int) -> int | None:
        """The step whose sinks are hidden from then on."""
        return self.step % total

    def check_run(self, run: RunStep) -> None:
        """Refuse a step that the run does not have.

        Raises:
            ValueError: the step does not exist.
        """
        if not -run.total <= self.step < run.total:
            raise ValueError(f"{self}: step {self.step} is not there; the run has steps 0 to {run.total - 1}")

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """Refuse sinks that were measured before and lack the step.

        Raises:
            ValueError: naming them.
        """
        self.sinks.check_steps([step for step in steps if step == self.step % total], total)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """The sinks found at the step; None before it."""
        run, step = self._at(hook)
        if run.step <= step:
            self.observe(keys, columns, hook)
        if run.step < step:
            return None
        held: dict[int, torch.Tensor | None] = run.memory.get(self._key(hook), {})
        if hook.layer() not in held:
            raise ValueError(f"{self} has not seen step {step} in layer {hook.layer()}: apply it there too")
        found = held[hook.layer()]
        if found is None:
            return None
        most = self.sinks.bounds["most"]
        return ColumnMask(grown(found, keys), self.stage, self.sinks.keep_self, self.sinks.renormalise, most=most)

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """Find the sinks at the step, also where a wrapper keeps the hook from acting."""
        run, step = self._at(hook)
        if run.step == step:
            run.memory.setdefault(self._key(hook), {})[hook.layer()] = self.sinks.found(keys, columns, hook)
        else:
            self.sinks.observe(keys, columns, hook)

    def _key(self, hook: PointContext) -> tuple[str, HookKey | None, "FreezeSinks"]:
        """Key of this hook's sinks in the run's memory; an equal hook at another place of the run has its own."""
        return "frozen", hook.place, self

    def _at(self, hook: PointContext) -> tuple[RunStep, int]:
        run = run_of(hook, self)
        self.check_run(run)
        return run, self.step % run.total


@makes_hook
def freeze_sinks(
    detector: Detector | str | Sequence[Position] | None = None, *, step: int, **settings: Any
) -> FreezeSinks | Limited:
    """Hide, from `step` on and including it, the columns that were sinks at `step`.

    The columns stay the same when sinks move; `mask_sinks` hides the sinks of every step. Sinks are found as by
    `mask_sinks`, by default in the pass of `step`. Positions instead of a detector are hidden in every head.

    Args:
        detector: the rule (or its text), or positions.
        step: counted from the most masked canvas, negative from the run's end.
        **settings: of `mask_sinks`: top, per, source, stage, renormalise, keep_self, relative, classes (of the
            tokens at `step`); for positions of `mask_positions`.

    Raises:
        ValueError: settings that contradict each other.
    """
    if isinstance(detector, Sequence) and not isinstance(detector, str):
        return at_steps(mask_positions(*detector, **settings), slice(step, None))
    return FreezeSinks(mask_sinks(detector, **settings), step)
