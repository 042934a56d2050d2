"""`HiddenMass`: a wrapper of a column hook that measures how much attention the hidden columns receive."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dlm_lens.attention import (
    ColumnHook,
    ColumnHookWrapper,
    ColumnMask,
    ColumnStats,
    PointContext,
    hidden_mass,
    hidden_per_map,
)


class HiddenMass(ColumnHookWrapper):
    """Hides the columns that `hook` hides, and sums the attention that they receive before they are hidden.

    The totals are means over the maps of all runs in which the hook acted. Outside a run nothing is summed.

    Args:
        hook: hides columns.
    """

    def __init__(self, hook: ColumnHook) -> None:
        self.hook = hook
        self._memories: dict[int, Any] = {}
        self._learned: list[Tensor] = []
        self._maps: list[Tensor] = []

    def __repr__(self) -> str:
        return repr(self.hook)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """The columns that the wrapped hook hides."""
        columns()
        found = self.hook.hidden(keys, columns, hook)
        if found is not None and hook.run is not None:
            self._memories[id(hook.run.memory)] = hook.run.memory
            learned = found.columns & hook.sinks.is_sink(keys, found.columns.device)
            self._learned.append(learned.sum(-1).float().mean())
            self._maps.append(found.columns.any(-1).float().mean())
        return found

    def totals(self) -> dict[str, float]:
        """Per map: hidden columns, their share of the attention, and the learned sink tokens among them.

        And the share of maps in which something was hidden.
        """
        memories = list(self._memories.values())
        return {
            "hidden": round(hidden_per_map(memories, self) or 0.0, 4),
            "mass": round(hidden_mass(memories, self) or 0.0, 4),
            "learned": _mean(self._learned),
            "maps": _mean(self._maps),
        }


def _mean(values: Sequence[Tensor]) -> float:
    return round(sum(map(float, values)) / max(1, len(values)), 4)
