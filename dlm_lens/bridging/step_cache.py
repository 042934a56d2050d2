"""`StepCache`: activations of chosen steps of a run, by name and step; its collector and its size in advance."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from dlm_lens.adapters.memory import free_bytes
from dlm_lens.arguments import SLICE, Rule, chosen_steps, kept_step, level_of_caller, listed_indices, whole
from dlm_lens.placement import devices, input_device
from dlm_lens.printable import is_array, shown


@dataclass(frozen=True, eq=False)
class StepCache:
    """Activations that a run kept, `cache[name, step]`.

    `cache[name]` stacks all steps into [step, ...], in the order of `steps`; a negative step counts from the last
    one kept, as in the stack. Every activation is kept once, and is found under all names that TransformerLens has
    for its hook point. With guidance the batch axis holds the conditional rows and then the unconditional ones.

    Args:
        names: the names that were requested and that ran.
        steps: the steps kept, counted from the most masked canvas.
        values: (the hook point's own name, step) -> the activation.
        aliases: every name -> the hook point's own.
        bridge: the model, for `at`.

    Raises:
        KeyError: from `cache[name]`, `cache[name, step]` and `at`, for a name or a step that was not kept.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: Mapping[tuple[str, int], Tensor] = field(repr=False)
    aliases: Mapping[str, str] = field(repr=False)
    bridge: Any = field(default=None, repr=False)

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """One activation for (name, step), or all steps of a name as [step, ...].

        Raises:
            KeyError: a name or a step that was not kept.
            ValueError: the steps are of unequal length (an AR run), so that they do not stack.
        """
        if isinstance(key, tuple):
            if len(key) != 2:
                raise KeyError(f"{shown(key)} names no activation; give cache[name, step] or cache[name]")
            return self._one(*key)
        found = [self._one(key, step) for step in self.steps]
        if len({value.shape for value in found}) > 1:
            raise ValueError(
                f"{key}: the steps have shapes {list(found[0].shape)} to {list(found[-1].shape)} and do not stack; "
                "take cache[name, step]"
            )
        return torch.stack(found)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, tuple) and len(key) != 2:
            return False
        name, steps = (key[0], key[1:]) if isinstance(key, tuple) else (key, self.steps[:1])
        own = self.aliases.get(str(name))
        return all((own, kept_step(step, self.steps)) in self.values for step in steps) and bool(steps)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict[str, Any]:
        """Without the bridge, which cannot be pickled; what `at` of a copy returns has no model."""
        return {**self.__dict__, "bridge": None}

    def _one(self, name: str, step: int) -> Tensor:
        value = self.values.get((self.aliases.get(name, name), self._kept(step)))
        if value is None:
            raise KeyError(f"{name!r} was not kept; there are {_listed(self.names)}")
        return value

    def _kept(self, step: int) -> int:
        """The number of a step that was kept.

        Raises:
            KeyError: it was not.
        """
        number = kept_step(step, self.steps)
        if number not in self.steps:
            raise KeyError(f"step {number} was not kept; there are {_listed(self.steps)}")
        return int(number)

    @property
    def nbytes(self) -> int:
        """Bytes of all activations."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    def at(self, step: int) -> ActivationCache:
        """One step as TransformerLens's own cache, under every name of what was kept.

        Raises:
            KeyError: a step that was not kept.
        """
        step = self._kept(step)
        found = {name: self.values.get((own, step)) for name, own in self.aliases.items()}
        kept = {name: value for name, value in found.items() if value is not None}
        return ActivationCache(kept, self.bridge, has_batch_dim=True)

    def to(self, device: str | torch.device) -> "StepCache":
        """A cache with the same activations on `device`."""
        return replace(self, values={key: value.to(device) for key, value in self.values.items()})


def _listed(items: Iterable[Any]) -> str:
    found = [str(item) for item in items]
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "") if found else "none"


NamesFilter = str | list[str] | Callable[[str], bool] | None
StepSelection = int | slice | Iterable[int] | None


def _positions(value: Any) -> bool:
    if isinstance(value, Slice) or is_array(value):
        return True
    if isinstance(value, tuple):
        value = slice(*value)
    return SLICE.holds(value) or (not isinstance(value, slice) and bool(listed_indices("position", value)))


POSITIONS = Rule("a position, a list of them, or a slice or (start, stop, step) of whole numbers", _positions)
"""A `pos_slice` of TransformerLens."""

SHARE_OF_FREE_MEMORY = 0.8
"""The share of a device's free memory that a cache may take."""


def chosen_points(bridge: Any, names_filter: NamesFilter) -> dict[str, list[str]]:
    """Hook points that the filter matches: own name -> the names that it matched.

    Raises:
        KeyError: no hook point has such a name, or one of those in a list.
    """
    for name in names_filter if isinstance(names_filter, list) else ():
        if name not in bridge.hook_dict:
            raise KeyError(f"names_filter: {shown(name)} is no hook point; see bridge.hook_dict for the names")
    matches = bridge._normalize_names_filter(names_filter)
    found: dict[str, list[str]] = {}
    silent = []
    for name, point in bridge.hook_dict.items():
        if not matches(name) or (names_filter is None and name != point.name):
            continue
        if bridge._gated_hook_reason(point.name):
            silent.append(name)
        else:
            found.setdefault(point.name, []).append(name)
    if not found:
        why = f"; {silent[0]} is switched off, see set_use_... of TransformerLens" if silent else ""
        raise KeyError(
            f"names_filter {names_filter!r} matches no hook point{why}; see bridge.hook_dict for the names"
        )
    return found


def bytes_per_step(
    bridge: Any, points: Iterable[str], positions: int, rows: int = 1, pos_slice: Any = None
) -> dict[str, int]:
    """Bytes of every hook point's activation in one forward pass over `positions` canvas positions.

    Measured in three passes over 1, 2 and 3 positions: an activation is at most quadratic in their number, and
    linear in it along the axis that `pos_slice` cuts.

    Raises:
        ValueError: fewer than one position or row, or a position of `pos_slice` that an activation does not have.
    """
    for number, value in (("positions", positions), ("rows", rows)):
        whole(least=1).check(number, value)
    return _measured(bridge, points, pos_slice).bytes(positions, rows)


class _Measured(NamedTuple):
    """Bytes of activations over 1, 2 and 3 positions, and their lengths along the axis that a `pos_slice` cuts."""

    sizes: Mapping[str, list[int]]
    lengths: Mapping[str, list[int]]
    pos_slice: Any

    def bytes(self, positions: int, rows: int, step: int | None = None) -> dict[str, int]:
        """Bytes of every activation over `positions` canvas positions, in `rows` rows.

        Raises:
            ValueError: a position of `pos_slice` that one does not have (at a step of a run).
        """
        found = {name: rows * _extended(each, positions) for name, each in self.sizes.items() if each}
        kept: dict[int, int] = {}
        for name, each in self.lengths.items():
            if each:
                length = _extended(each, positions)
                if length not in kept:
                    kept[length] = _cut(name, torch.arange(length), self.pos_slice, 0, step).numel()
                found[name] = found[name] // length * kept[length]
        return found


def _measured(bridge: Any, points: Iterable[str], pos_slice: Any) -> _Measured:
    """The sizes of activations in three passes over one row of 1, 2 and 3 positions."""
    sizes: dict[str, list[int]] = {name: [] for name in points}
    lengths: dict[str, list[int]] = {name: [] for name in sizes}

    def measure(tensor: Any, hook: Any) -> None:
        if isinstance(tensor, Tensor):
            sizes[hook.name].append(tensor.numel() * tensor.element_size())
            if pos_slice is not None and tensor.ndim >= 2:
                lengths[hook.name].append(tensor.shape[bridge._pos_slice_dim(hook.name, hook)])

    device = input_device(bridge.original_model)
    with torch.no_grad(), _hooks_aside(bridge), bridge.hooks(fwd_hooks=[(name, measure) for name in sizes]):
        for length in (1, 2, 3):
            bridge(torch.zeros(1, length, dtype=torch.long, device=device), use_cache=False)
    return _Measured(sizes, lengths, pos_slice)


@contextmanager
def _hooks_aside(bridge: Any) -> Iterator[None]:
    """A block without the hooks that are on the bridge, which may edit a position that is not there."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    tables = [(point, name, getattr(point, name)) for point in bridge.hook_points() for name in names]
    for point, name, _ in tables:
        setattr(point, name, OrderedDict())
    try:
        yield
    finally:
        for point, name, table in tables:  # the same objects, from which the handles remove the hooks
            setattr(point, name, table)


def _cut(name: str, value: Tensor, pos_slice: Any, dim: int, step: int | None = None) -> Tensor:
    """The positions of an activation that a `pos_slice` keeps; at a step of a run.

    Raises:
        ValueError: it names one that the activation does not have.
    """
    try:
        found: Tensor = Slice.unwrap(pos_slice).apply(value, dim=dim)
    except IndexError:
        length = value.shape[dim]
        at = "" if step is None else f" at step {step}, which sees the canvas as far as it is written"
        raise ValueError(
            f"pos_slice is {shown(pos_slice)}, and {name} has {length} positions, 0 to {length - 1}{at}"
        ) from None
    return found


def _extended(sizes: list[int], positions: int) -> int:
    """The quadratic through (1, a), (2, b), (3, c), at `positions`."""
    one, two, three = sizes[0], sizes[len(sizes) // 3], sizes[-1]
    first, second = two - one, three - 2 * two + one
    n = positions - 1
    return one + n * first + n * (n - 1) // 2 * second


@dataclass
class CacheCollector:
    """The hook that collects activations of chosen points at chosen steps of a run.

    Args:
        bridge: the model.
        points: own name -> names that were requested.
        wanted: the steps to keep; None for all.
        device: device that activations are moved to; None for no move, or for a model over several devices to
            that of the canvas.
        positions: the positions to keep, as TransformerLens's `pos_slice`.
        limit: the largest size in bytes; None for `SHARE_OF_FREE_MEMORY` of the free memory.
        copies: whether activations are copied, since a hook that runs later may edit them in place.
    """

    bridge: Any
    points: Mapping[str, list[str]]
    wanted: StepSelection = None
    device: Any = None
    positions: Any = None
    limit: int | None = None
    copies: bool = False
    steps: tuple[int, ...] = ()
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def check(self, rows: int, seen: Mapping[int, int], cache: str | None) -> None:
        """Resolve the steps, and refuse a cache that does not fit into memory.

        Args:
            rows: of the network.
            seen: step -> how many positions it sees at most, of those that the run computes, up to its last one.
            cache: the run's approximate cache.

        Raises:
            MemoryError: the cache is larger than the limit; the message has its size and remedies.
            ValueError: a step that the run does not have, positions of a run with an approximate cache, or one
                that a step does not see.
        """
        if cache is not None and self.positions is not None:
            raise ValueError(
                f"pos_slice={shown(self.positions)} with cache={cache!r}: activations have the positions that a "
                "step computes, and a number would be another one of the canvas at each step; leave pos_slice out "
                "(run.computed has the positions of every step), or the cache"
            )
        self.steps = self._computed(seen)
        measured = _measured(self.bridge, self.points, self.positions)
        # The first step that sees so many positions, which an error names; the last of them costs most.
        first = {seen[step]: step for step in reversed(self.steps)}
        each = {length: measured.bytes(length, rows, step) for length, step in sorted(first.items())}
        costs = each[max(each)]
        needed = sum(sum(each[seen[step]].values()) for step in self.steps)
        if self.device is None and len(devices(self.bridge.original_model)) > 1:
            # Layers on several devices: activations can be stacked and compared on one device only.
            self.device = input_device(self.bridge.original_model)
        device = torch.device(self.device or input_device(self.bridge.original_model))
        free = free_bytes(device)
        limit = self.limit if self.limit is not None or free is None else int(SHARE_OF_FREE_MEMORY * free)
        if limit is None or needed <= limit:
            return
        largest = max(costs, key=lambda name: costs[name])
        most = " at most" if len(each) > 1 else ""
        raise MemoryError(
            f"the cache would take {_size(needed)} ({len(costs)} activations of {len(self.steps)} steps; {largest} "
            f"alone {_size(costs[largest])} per step{most}), and {_size(limit)} may be used on {device}; narrow "
            "names_filter, give fewer cache_steps or a pos_slice, or device='cpu'"
        )

    def _computed(self, seen: Mapping[int, int]) -> tuple[int, ...]:
        """The steps to keep, of those that the run computes.

        Raises:
            ValueError: a step that the run does not have, or one before those that a resumed run computes.
        """
        total = max(seen) + 1
        chosen = chosen_steps(self.wanted, total)
        found = tuple(step for step in chosen if step in seen)
        every = self.wanted is None or isinstance(self.wanted, slice)
        if not found or (len(found) < len(chosen) and not every):
            raise ValueError(
                f"cache_steps={shown(self.wanted)} has step {chosen[0]}, which a resumed run does not compute "
                f"again: give steps from {min(seen)} to {total - 1}"
            )
        return found

    def __call__(self, tensor: Any, hook: Any) -> None:
        """Keep the activation if the step is wanted; `hook` is a StepPoint."""
        if hook.step not in self.steps or not isinstance(tensor, Tensor):
            return
        kept = tensor.detach().clone() if self.copies else tensor.detach()
        if self.positions is not None and kept.ndim >= 2:
            # A copy: a view would keep all positions alive.
            dim = self.bridge._pos_slice_dim(hook.name, hook)
            kept = _cut(hook.name, kept, self.positions, dim, hook.step).clone()
        self.values[hook.name, hook.step] = kept.to(self.device) if self.device is not None else kept

    def check_end(self, ran: int) -> None:
        """Tell which steps a run of `ran` steps did not reach; a slice from its beginning takes what there is.

        Raises:
            ValueError: it ended before the first of the steps.
        """
        missed = [step for step in self.steps if step >= ran]
        bounds = (self.wanted.start, self.wanted.stop) if isinstance(self.wanted, slice) else ()
        open_ended = self.wanted is None or (bounds and all(bound is None or bound >= 0 for bound in bounds))
        none_ran = len(missed) == len(self.steps)
        if not missed or (open_ended and not none_ran):
            return
        sentence = (
            f"cache_steps={self.wanted!r} counts the steps that were planned, among them "
            f"{', '.join(map(str, missed))}, but this run ended after {ran}, which depended on its tokens: "
            f"give steps below {ran}"
        )
        if none_ran:
            raise ValueError(sentence)
        warnings.warn(sentence, stacklevel=level_of_caller())

    def result(self) -> StepCache:
        """The cache."""
        seen = {name for name, _ in self.values}
        names = tuple(name for own, matched in self.points.items() if own in seen for name in matched)
        aliases = {name: point.name for name, point in self.bridge.hook_dict.items() if point.name in seen}
        steps = tuple(sorted({step for _, step in self.values}))
        return StepCache(names, steps, self.values, aliases, self.bridge)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
