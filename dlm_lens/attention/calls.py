"""Hooks where they wait: as forward hooks of modules, which can be switched off in place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dlm_lens.attention.context import PointContext
from dlm_lens.attention.protocols import ColumnHook, Hook


def _never() -> bool:
    return False


@dataclass(frozen=True)
class HookCall:
    """A hook as a forward hook of its module.

    Args:
        hook: the intervention.
        context: what the hook is told.
        off: whether the hook does not act now; it keeps its place among the module's hooks.
    """

    hook: Hook
    context: Callable[[], PointContext]
    off: Callable[[], bool] = _never

    def __call__(self, module: nn.Module, inputs: Any, value: Any) -> Any:
        """The edited activation, of a module with several outputs the first."""
        if self.off():
            return value
        if isinstance(value, Tensor):
            return self.hook(value, self.context())
        return (self.hook(value[0], self.context()), *value[1:])


@dataclass(frozen=True)
class ColumnCall(HookCall):
    """A column hook at its point: a forward hook that attention can also run in stream."""

    hook: ColumnHook


def column_calls(*points: nn.Module) -> list[ColumnCall]:
    """The column hooks that act at these points, in order."""
    calls = [call for point in points for call in point._forward_hooks.values()]
    return [call for call in calls if isinstance(call, ColumnCall) and not call.off()]


def needs_value(call: Any) -> bool:
    """Whether a forward hook must be given the value itself: not if it is off, or can run in stream."""
    return not isinstance(call, HookCall) or not (call.off() or isinstance(call, ColumnCall))
