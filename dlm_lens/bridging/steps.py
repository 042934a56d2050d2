"""What follows a run inside a bridge: the step it is in, for the hooks that ask."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import (
    ColumnHook,
    ColumnStats,
    Hook,
    HookKey,
    RunStep,
    columns_of,
    counted_queries,
    hook_keys,
    listening,
    visible_in,
)
from dlm_lens.sampling import StepPlan
from dlm_lens.sampling.observers import StepObserver, check_hooks, hidden_in

HookFunction = Callable[[Any, Any], Any]
Placed = tuple[str | Callable[[str], bool], HookFunction]
"""A hook point's name, or a filter of names, and the function that runs there."""

_STATE = {field.name for field in fields(RunStep)} | {"progress", "prompt"}


class StepPoint:
    """A HookPoint of TransformerLens at one step of a run, as `denoise` hands it to hooks.

    It has what the HookPoint has (`name`, `layer()`, `ctx`, `sinks`, ...) and what the `RunStep` has (`step`,
    `total`, `tokens`, `masked`, `valid`, `progress`, ...); `run` is the RunStep itself.
    """

    def __init__(self, point: Any, run: RunStep, place: HookKey | None = None) -> None:
        self.point, self.run, self.place = point, run, place

    def __getattr__(self, name: str) -> Any:
        if name in ("point", "run", "place"):  # a copy that was never initialised
            raise AttributeError(name)
        return getattr(self.run if name in _STATE else self.point, name)

    def __repr__(self) -> str:
        return f"StepPoint(name={self.point.name!r}, step={self.run.step})"


class BridgeRun(StepObserver):
    """Runs hooks on a bridge's hook points for one run, each told of the step; use it as a context.

    Args:
        bridge: whose hook points.
        hooks: (name or filter, function), in the order in which they run.
        on_start: called once, before the first forward pass, as (rows of the network, positions, steps).
    """

    needs_full_logits = True

    def __init__(
        self, bridge: Any, hooks: Sequence[Placed], on_start: Callable[[int, int, int], None] | None = None
    ) -> None:
        super().__init__(bridge.original_model)
        self.bridge, self.hooks, self.on_start = bridge, hooks, on_start
        self._stack = ExitStack()

    def __enter__(self) -> "BridgeRun":
        with ExitStack() as stack:
            stack.enter_context(listening(self.model))
            stack.enter_context(
                self.bridge.hooks(
                    fwd_hooks=[(name, self._told(hook, place)) for name, hook, place in self._placed()]
                )
            )
            if any(getattr(hook, "needs_clean_pass", False) for _, hook in self.hooks):
                stack.callback(self.model.register_forward_pre_hook(self._pass_clean, with_kwargs=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(
        self, plan: StepPlan, canvas: Int[Tensor, "batch position"], masked: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """A step begins; before the first one hooks may refuse the run."""
        canvas = super().step(plan, canvas, masked)
        # With guidance the network sees every row twice.
        rows = len(canvas) * (2 if self.sampler is not None and self.sampler.cfg_scale else 1)
        if self.now is not None:
            self.now = self.now.for_rows(rows)
            if plan.index == 0:
                self._begin(rows, canvas.shape[1], self.now)
        return canvas

    def record(self, hooks: Sequence[Hook]) -> dict[str, Any]:
        """What a finished run's settings say of its hooks, as `dlm_lens.denoise` has it."""
        if not hooks:
            return {}
        found: dict[str, Any] = {"hooks": tuple(map(repr, hooks))}
        if any(isinstance(hook, ColumnHook) for hook in hooks):
            found |= hidden_in(self._memory, hooks)
        return found

    def _begin(self, rows: int, positions: int, now: RunStep) -> None:
        # Functions of TransformerLens's kind have no check.
        functions: list[Any] = [function for _, function in self.hooks]
        check_hooks(functions, now)
        if self.on_start is not None:
            with self._silence():
                self.on_start(rows, positions, now.total)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Keep passes that are no steps from the run's hooks and from who observes the bridge."""
        self.bridge.silent = True
        try:
            yield
        finally:
            self.bridge.silent = False

    def at(self, point: Any, rows: int, place: HookKey | None = None) -> Any:
        """The point as the hook at `place` shall see it, with the run's rows as in an activation of so many."""
        if self.now is None:
            return point
        fits = rows > 0 and rows % len(self.now.tokens) == 0
        return StepPoint(point, self.now.for_rows(rows) if fits else self.now, place)

    def _placed(self) -> Iterator[tuple[str | Callable[[str], bool], HookFunction, HookKey]]:
        """Every hook at every point, with its place among the hooks of that point."""
        for index, (name, hook) in enumerate(self.hooks):
            here = [other for where, other in self.hooks[: index + 1] if where == name]
            yield name, hook, hook_keys(here)[-1]

    def _told(self, function: HookFunction, place: HookKey) -> Callable[..., Any]:
        def hook_function(tensor: Any, hook: Any) -> Any:
            if self.bridge.silent:
                return None
            rows = tensor.shape[0] if isinstance(tensor, Tensor) and tensor.ndim else 0
            return function(tensor, hook=self.at(hook, rows, place))  # type: ignore[call-arg]

        return hook_function

    def _pass_clean(self, model: Any, inputs: Any, kwargs: Any) -> None:
        """What every layer's keys receive without hooks: one more pass over the same input, in front of it."""
        if self.bridge.silent or self.now is None or self.now.clean is not None:
            return
        columns: dict[int, ColumnStats] = {}

        def read(scores: Float[Tensor, "batch head query key"], hook: Any) -> None:
            rows, _, length, keys = scores.shape
            queries = counted_queries(rows, length, keys, self.at(hook, rows), scores.device)
            pattern = hook.attention_pass.softmax(scores)
            columns[hook.layer()] = columns_of(pattern, visible_in(scores), queries)

        points = [(f"blocks.{layer}.attn.hook_attn_scores", read) for layer in range(len(self.bridge.blocks))]
        with self._silence(), torch.no_grad(), self.bridge.hooks(fwd_hooks=points):
            model(*inputs, **kwargs)
        self.now = replace(self.now, clean=lambda: columns)
