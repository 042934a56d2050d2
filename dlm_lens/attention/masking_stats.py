"""What hooks have hidden so far in a run: columns, and the attention that these columns received."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlm_lens.attention.column_masking import COLUMNS, MASS
from dlm_lens.attention.hook import key_of
from dlm_lens.attention.hook_context import HookKey

Memory = Mapping[Any, Any]
"""`RunStep.memory`, of one run."""


def hook_keys(hooks: Iterable[Any]) -> list[HookKey]:
    """The place of every hook in a list: it distinguishes the hook, and the hooks inside it, from equal ones."""
    found: list[HookKey] = []
    for hook in hooks:
        key = key_of(hook)
        found.append((key, sum(key == other for other, _ in found)))
    return found


def hidden_per_map(memory: Memory | Sequence[Memory], hook: Any, place: HookKey | None = None) -> float | None:
    """Columns that `hook` hid so far in the runs of these memories, the mean over the maps in which it acted.

    A map is one pattern: of one head in one layer, row and step (with guidance, of both halves' rows). Steps,
    layers, heads and rows in which a wrapper such as `at_steps` kept the hook from acting do not count. None if it
    acted in no map. Equal hooks of one run count together, unless `place` names one of them (`hook_keys`).
    """
    return _per_map(memory, COLUMNS, key_of(hook), place)


def hidden_mass(memory: Memory | Sequence[Memory], hook: Any, place: HookKey | None = None) -> float | None:
    """Share of the attention that the columns hidden by `hook` received before it hid them.

    sum_j r_j / n over the hidden columns j, where r_j is what the n counted queries give to j; the mean over the
    maps of `hidden_per_map` in which the hook computed what columns receive. None if it never did.
    """
    return _per_map(memory, MASS, key_of(hook), place)


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
