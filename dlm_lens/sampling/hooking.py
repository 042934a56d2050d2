"""`HookRunner`: runs interventions inside a denoising run, each told of the step."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import (
    AttentionInputs,
    ColumnHook,
    Columns,
    Hook,
    PointContext,
    RunStep,
    SinkLayout,
    attached,
    counted_queries,
    hidden_mass,
    hidden_per_map,
    hooked_attentions,
    listening,
    places_of,
    stream_columns,
)
from dlm_lens.sampling.host import Follower
from dlm_lens.sampling.sampler import StepPlan


class HookRunner(Follower):
    """Attaches hooks to a model for one run; use it as a context around the run.

    A hook that says `needs_clean` finds, at `run.clean()`, what every layer's keys receive in a pass over the same
    canvas without hooks; that pass runs once a step, in front of the real one.

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
        self.hooks, self.forward = tuple(hooks), forward
        self.record = {} if record is None else record
        self._checked = self._off = False
        self._attached = ExitStack()

    def __enter__(self) -> "HookRunner":
        now = attached(self.model, *self.hooks, run=lambda: self.now, off=lambda: self._off)
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
        if any(getattr(hook, "needs_clean", False) for hook in self.hooks):
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
    placed = list(zip(hooks, places_of(hooks), strict=True))
    return {
        "columns_hidden": tuple(hidden_per_map(memory, hook, place) for hook, place in placed),
        "mass_hidden": tuple(hidden_mass(memory, hook, place) for hook, place in placed),
    }


def check_hooks(hooks: Sequence[Hook], run: RunStep) -> None:
    """Let hooks with a `check_run` refuse what this run or its model do not have, before anything is computed.

    Raises:
        ValueError: a step, a layer or a head that is not there.
    """
    for hook in hooks:
        check = getattr(hook, "check_run", None)
        if check is not None:
            check(run)


@contextmanager
def collecting_columns(model: Any, run: RunStep) -> Iterator[Mapping[int, Columns]]:
    """Collect what the keys of every layer receive in the forward passes inside the block, without patterns."""
    columns: dict[int, Columns] = {}
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
