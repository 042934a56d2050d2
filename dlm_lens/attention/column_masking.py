"""Columns of attention to hide: which entries of scores or pattern go, and how many were hidden in a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import check_index
from dlm_lens.attention.column_stats import ColumnStats
from dlm_lens.attention.hook_context import HookContext, PointContext
from dlm_lens.attention.visibility import visible_keys

Stage = Literal["before_softmax", "after"]
"""Hide scores (the other keys take over the attention) or entries of the pattern (the rows lose it)."""

COLUMNS, MASS = "columns hidden", "attention hidden"
"""Entries of a run's memory: (which of the two, `Hook.key`, place) -> [total, number of maps]."""


@dataclass(frozen=True, eq=False)
class ColumnMask:
    """Columns to hide from the queries.

    A row that would lose every key keeps its own position; with `keep_self` every row does. (A padding row, which
    does not see itself, stays as it was.) `renormalise` makes rows sum to 1 again after the softmax.

    Args:
        columns: which keys are hidden.
        stage: in the scores or in the pattern.
        keep_self: every query keeps its own position.
        renormalise: rows sum to 1 again after the softmax.
        heads: sets of head indices, negative from the end; keys are hidden only in heads that are in all of them.
        rows: keys are hidden only in these rows of the batch; None for all.
        keep: from the queries' own positions and the number of keys: which of the columns each query still sees.
        most: upper bound of the columns hidden in one map; None if computing it would wait for the device.
        leaves_one: whether at least one key that the queries of a map see stays visible.
        edge: only the first `edge` queries can lose every key; None if computing it would wait for the device.
    """

    columns: Bool[Tensor, "#batch #head key"]
    stage: Stage = "before_softmax"
    keep_self: bool = False
    renormalise: bool = False
    heads: tuple[tuple[int, ...], ...] = ()
    rows: Bool[Tensor, "batch"] | None = None
    keep: Callable[[Int[Tensor, "query"], int], Bool[Tensor, "query key"]] | None = None
    most: int | None = None
    leaves_one: bool = False
    edge: int | None = None

    def only_heads(self, heads: tuple[int, ...]) -> "ColumnMask":
        """The same mask, in these heads only."""
        return replace(self, heads=(*self.heads, heads))

    def only_rows(self, rows: Bool[Tensor, "batch"]) -> "ColumnMask":
        """The same mask, in these rows of the batch only."""
        return replace(self, rows=rows if self.rows is None else self.rows & rows)

    def resolved(self, heads: int, device: torch.device) -> "ColumnMask":
        """The same mask on `device`, with `heads` and `rows` applied to the columns of a module with `heads` heads.

        Raises:
            ValueError: a head that is not there.
        """
        columns = self.columns.to(device)
        if self.rows is not None:
            columns = columns & self.rows.to(device)[:, None, None]
        if self.heads:
            columns = columns & _head_flags(self.heads, heads, device)[:, None]
        return replace(self, columns=columns)

    def maps(self, rows: int, heads: int) -> int | Int[Tensor, ""]:
        """In how many maps of the batch (one per row and head) columns may be hidden."""
        chosen: int | Tensor = rows if self.rows is None else self.rows.sum()
        return chosen * len(_heads_in_all(self.heads, heads))

    def acts_in(self, rows: int, heads: int, device: torch.device) -> Bool[Tensor, "batch head"]:
        """The maps in which columns may be hidden."""
        chosen = torch.ones(rows, 1, dtype=torch.bool, device=device)
        chosen = chosen if self.rows is None else chosen & self.rows.to(device)[:, None]
        return chosen & _head_flags(self.heads, heads, device)

    def entries(
        self, visible: Bool[Tensor, "batch #head query key"], own: Int[Tensor, "query"]
    ) -> Bool[Tensor, "batch head query key"]:
        """The entries of the pattern to hide; `own` is the key at every query's own position."""
        hidden = self.columns[:, :, None, :].to(visible.device) & visible
        itself = own[:, None] == torch.arange(visible.shape[-1], device=visible.device)
        if self.keep is not None:
            hidden = hidden & ~self.keep(own, visible.shape[-1])
        if self.keep_self:
            hidden = hidden & ~itself
        # A row that would lose every key keeps itself; one that does not see itself stays as it was.
        empty = ~(visible & ~hidden).any(-1, keepdim=True)
        sees_itself = (visible & itself).any(-1, keepdim=True)
        return hidden & ~(empty & (itself | ~sees_itself))


def _heads_in_all(sets: tuple[tuple[int, ...], ...], count: int) -> set[int]:
    """The heads, counted from 0, that are in all sets."""
    chosen = set(range(count))
    for heads in sets:
        for head in heads:
            check_index("head", head, count)
        chosen &= {head % count for head in heads}
    return chosen


def _head_flags(sets: tuple[tuple[int, ...], ...], count: int, device: torch.device) -> Bool[Tensor, "head"]:
    """True at the heads that are in all sets; made on the device, where a copy would wait for it."""
    flags = torch.zeros(count, dtype=torch.bool, device=device)
    for head in _heads_in_all(sets, count):
        flags[head : head + 1] = True  # a slice is filled, an index would copy from the CPU
    return flags


def visible_from_pattern(
    pattern: Float[Tensor, "batch head query key"], context: PointContext
) -> Bool[Tensor, "batch #head query key"]:
    """Which query sees which key, inferred from the zeros of a pattern where no `AttentionPass` is known.

    A single zero may be an underflow. A column of zeros is hidden (from all queries but perhaps its own), and
    without a run an upper triangle of zeros is a causal mask. A column that an earlier hook hid from some queries
    only (`keep_only`) cannot be recognised: the hosts of this library pass an `AttentionPass`, which records it.
    """
    rows, _, queries, keys = pattern.shape
    run = context.run
    own = own_keys(queries, keys, pattern.device, None if run is None else run.first_of(queries))[:, None]
    key = torch.arange(keys, device=pattern.device)
    positive = pattern > 0
    others = (positive & (key != own)).any(-2, keepdim=True)
    found = torch.where(key == own, positive | others, others)
    if run is None:
        later = key > own
        causal = bool(later.any()) and not bool(positive[..., later].any())
        return found & ~later if causal else found
    content = run.for_rows(rows).valid.to(pattern.device)
    layout = context.sinks
    visible = visible_keys(content, causal=context.causal)
    if layout.count:
        visible = layout.restrict(layout.widen(visible), keys, pattern.device)
    return visible[..., own.squeeze(-1), :] & found


def own_keys(queries: int, keys: int, device: torch.device, start: int | None = None) -> Int[Tensor, "query"]:
    """Each query's own position among the keys; where there are fewer queries and no `start`, the last keys."""
    first = keys - queries if start is None else start
    return torch.arange(first, first + queries, device=device)


def counted_queries(
    rows: int,
    queries: int,
    keys: int,
    context: HookContext | None,
    device: torch.device,
    seen: Bool[Tensor, "#batch key"] | None = None,
    start: int | None = None,
) -> Bool[Tensor, "batch query"]:
    """Queries that count: content of the canvas, never the rows of learned sink tokens.

    In a run, content is `RunStep.valid`. Without a run it is what any query sees before the hooks (`seen`, None for
    all): padding, whose keys are hidden from every query, does not count as a query either. The queries begin at
    key `start`; None: they are the last ones.

    Raises:
        ValueError: attention has another number of canvas positions than the run's step, as with a cache.
    """
    point = PointContext.of(context)
    layout, run = point.sinks, point.run
    counted = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    canvas = counted[:, layout.canvas(keys)]
    if run is None:
        canvas[:] = True if seen is None else seen[:, layout.canvas(keys)]
    else:
        valid = run.for_rows(rows).valid
        if valid.shape[-1] != canvas.shape[-1]:
            raise ValueError(
                f"attention has {canvas.shape[-1]} canvas positions and the run's step {valid.shape[-1]}; decode "
                "without a cache (use_cache=False)"
            )
        canvas[:] = valid.to(device)
    return counted[:, own_keys(queries, keys, device, start)]


def count_hidden(
    key: Any, hidden: ColumnMask, rows: int, heads: int, context: PointContext, given: ColumnStats | None = None
) -> None:
    """Add to the run's memory how many columns of content were hidden, and in how many maps (row and head).

    Args:
        key: `Hook.key` of the hook that hides them.
        hidden: the mask, with columns of every map.
        rows: rows of the batch.
        heads: heads of the layer.
        context: of the point; without a run nothing is counted.
        given: the statistics, where the hook computed them: then what these columns received is added too.
    """
    run = context.run
    if run is None:
        return
    keys, device = hidden.columns.shape[-1], hidden.columns.device
    content = context.sinks.is_sink(keys, device).repeat(rows, 1)
    content[:, context.sinks.canvas(keys)] = run.for_rows(rows).valid.to(device)
    columns = (hidden.columns & content[:, None]).expand(rows, heads, keys)
    maps = hidden.maps(rows, heads)
    _add(run.memory, (COLUMNS, key, context.place), columns.sum(), maps)
    if given is not None:
        received = (given.sums.to(device) * columns).sum((1, 2)) / given.counted.to(device).clamp(min=1)
        _add(run.memory, (MASS, key, context.place), received.sum(), maps)


def _add(memory: Any, key: Any, total: Tensor, maps: int | Tensor) -> None:
    """Add on the device of the first layer that counted: nothing waits for the CPU here."""
    held = memory.setdefault(key, [torch.zeros((), dtype=total.dtype, device=total.device), 0])
    device = held[0].device
    held[0], held[1] = held[0] + total.to(device), held[1] + (maps.to(device) if isinstance(maps, Tensor) else maps)
