"""`Weighed`: a hook that hides what another one hides, and keeps account of it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dlm_lens.attention import (
    ColumnHook,
    ColumnMask,
    ColumnStats,
    HookWrapper,
    PointContext,
    hidden_mass,
    hidden_per_map,
)


class Weighed(HookWrapper, ColumnHook):
    """A column hook under watch: it acts as it did, and what its columns receive is always asked.

    Numbers are means over the maps of all runs that it acted in; a hook without a run has none.

    Args:
        hook: the one that hides columns.
    """

    hook: ColumnHook

    def __init__(self, hook: ColumnHook) -> None:
        self.hook = hook
        self._memories: dict[int, Any] = {}
        self._learned: list[Tensor] = []

    def __repr__(self) -> str:
        return repr(self.hook)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """What the hook hides."""
        columns()
        found = self.hook.hidden(keys, columns, hook)
        if found is not None and hook.run is not None:
            self._memories[id(hook.run.memory)] = hook.run.memory
            learned = found.columns & hook.sinks.is_sink(keys, found.columns.device)
            self._learned.append(learned.sum(-1).float().mean())
        return found

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """Let the hook see a step at which it does not act."""
        self.hook.observe(keys, columns, hook)

    def account(self) -> dict[str, float]:
        """Columns of content hidden per map, their share of the attention, and learned sink tokens among them."""
        memories = list(self._memories.values())
        return {
            "hidden": round(hidden_per_map(memories, self) or 0.0, 4),
            "mass": round(hidden_mass(memories, self) or 0.0, 4),
            "learned": round(sum(map(float, self._learned)) / max(1, len(self._learned)), 4),
        }
