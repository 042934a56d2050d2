"""What hooks have hidden so far in a run: columns, and the attention that went to them, in the run's memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_lens.attention.sink_layout import SinkLayout

if TYPE_CHECKING:
    from dlm_lens.attention.column_masking import ColumnMask, ColumnStats

COLUMNS, MASS = "columns hidden", "attention hidden"

HookKey = tuple[Any, int]
"""What tells a hook of a run from the others: itself, and how many equal ones stand before it."""

Memory = Mapping[Any, Any]
"""`RunStep.memory`, of one run."""


def count_hidden(
    hook: Any, hidden: "ColumnMask", rows: int, heads: int, context: Any, given: "ColumnStats | None" = None
) -> None:
    """Add to the run's memory how many columns of content were hidden, and in how many maps (row and head).

    Where the hook asked for the statistics, which are `given` then, also what these columns received.
    """
    run = getattr(context, "run", None)
    if run is None:
        return
    keys, device = hidden.columns.shape[-1], hidden.columns.device
    layout: SinkLayout = getattr(context, "sinks", None) or SinkLayout()
    content = layout.is_sink(keys, device).repeat(rows, 1)
    content[:, layout.canvas(keys)] = run.for_rows(rows).valid.to(device)
    columns = (hidden.columns & content[:, None]).expand(rows, heads, keys)
    maps = hidden.maps(rows, heads)
    place = getattr(context, "place", None)
    _add(run.memory, (COLUMNS, _key(hook), place), columns.sum(), maps)
    if given is not None:
        received = (given.sums.to(device) * columns).sum((1, 2)) / given.counted.to(device).clamp(min=1)
        _add(run.memory, (MASS, _key(hook), place), received.sum(), maps)


def hook_keys(hooks: Iterable[Any]) -> list[HookKey]:
    """The place of every hook: what tells it, and the hooks inside it, from equal ones of the same list."""
    found: list[HookKey] = []
    for hook in hooks:
        key = _key(hook)
        found.append((key, sum(key == other for other, _ in found)))
    return found


def hidden_per_map(memory: Memory | Sequence[Memory], hook: Any, place: HookKey | None = None) -> float | None:
    """Columns that `hook` hid so far in the runs of these memories, on average over the maps that it looked at.

    A map is one pattern: of one head in one layer, row and step (with guidance both halves' rows). Steps, layers,
    heads and rows in which a wrapper kept the hook from acting do not count. None if it looked at none. Equal hooks
    of one run count together, unless `place` names one of them (`hook_keys`).
    """
    return _per_map(memory, COLUMNS, _key(hook), place)


def hidden_mass(memory: Memory | Sequence[Memory], hook: Any, place: HookKey | None = None) -> float | None:
    """Share of the attention that went to what `hook` hid so far in these runs, in front of the hook.

    sum_j r_j / n over the hidden columns j, r_j what the n counted queries give to j; the mean over the maps of
    `hidden_per_map` at which the hook asked what columns receive. None if it never asked. `place` as there.
    """
    return _per_map(memory, MASS, _key(hook), place)


def _add(memory: Any, key: Any, total: Tensor, maps: int | Tensor) -> None:
    """Add on the device of the first layer that counted: nothing waits for the host here."""
    held = memory.setdefault(key, [torch.zeros((), dtype=total.dtype, device=total.device), 0])
    device = held[0].device
    held[0], held[1] = held[0] + total.to(device), held[1] + (maps.to(device) if isinstance(maps, Tensor) else maps)


def _per_map(memory: Memory | Sequence[Memory], what: str, hook: Any, place: HookKey | None) -> float | None:
    memories = [memory] if isinstance(memory, Mapping) else memory
    held = [
        value
        for one in memories
        for key, value in one.items()
        if isinstance(key, tuple) and key[:2] == (what, hook) and place in (None, key[-1])
    ]
    maps = sum(float(count) for _, count in held)
    return sum(float(total) for total, _ in held) / maps if maps else None


def _key(hook: Any) -> Any:
    """What stands for a hook in memory: itself, or its identity where it is not a value."""
    try:
        hash(hook)
    except TypeError:
        return id(hook)
    return hook
