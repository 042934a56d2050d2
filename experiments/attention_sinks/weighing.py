"""`Weighed`: a hook that hides what another one hides, and keeps account of it."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import (
    ColumnMask,
    ColumnStats,
    HookContext,
    SinkLayout,
    hidden_mass,
    hidden_per_map,
    hide_columns,
)


class Weighed:
    """A column hook under watch: it acts as it did, and what its columns receive is always asked.

    Numbers are means over the maps of all runs that it acted in; a hook without a run has none.

    Args:
        hook: the one that hides columns.
    """

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self._memories: dict[int, Any] = {}
        self._learned: list[Tensor] = []

    def __repr__(self) -> str:
        return repr(self.hook)

    def __getattr__(self, name: str) -> Any:
        # Site, layers, needs_clean_pass, check_run, observe: the hook's own, and absent where it has none.
        if name == "hook":
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(
        self, tensor: Float[Tensor, "batch head query key"], hook: HookContext | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """The scores or the pattern without the columns."""
        return hide_columns(self, tensor, hook)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: HookContext | None) -> ColumnMask | None:
        """What the hook hides."""
        columns()
        found: ColumnMask | None = self.hook.hidden(keys, columns, hook)
        run = getattr(hook, "run", None)
        if found is not None and run is not None:
            self._memories[id(run.memory)] = run.memory
            layout: SinkLayout = getattr(hook, "sinks", None) or SinkLayout()
            learned = found.columns & layout.is_sink(keys, found.columns.device)
            self._learned.append(learned.sum(-1).float().mean())
        return found

    def account(self) -> dict[str, float]:
        """Columns of content hidden per map, their share of the attention, and learned sink tokens among them."""
        memories = list(self._memories.values())
        return {
            "hidden": round(hidden_per_map(memories, self) or 0.0, 4),
            "mass": round(hidden_mass(memories, self) or 0.0, 4),
            "learned": round(sum(map(float, self._learned)) / max(1, len(self._learned)), 4),
        }
