"""Hiding columns of attention: what each key receives, which columns go, and the edit of scores or pattern."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import check_index
from dlm_lens.attention.column_stats import column_sums, expected_received, viewers
from dlm_lens.attention.masking_stats import count_hidden
from dlm_lens.attention.sink_layout import SinkLayout
from dlm_lens.attention.visibility import AttentionPass, visible_in, visible_keys

if TYPE_CHECKING:
    from dlm_lens.attention.hook import ColumnHook, HookContext

Stage = Literal["before_softmax", "after"]
"""Hide scores (the other keys take over the attention) or entries of the pattern (the rows lose it)."""


@dataclass(frozen=True, eq=False)
class ColumnStats:
    """What the keys of one layer receive at one step, in the network's order of positions.

    Args:
        sums: r_j = sum_i A_ij over the counted queries.
        expected: e_j, the same under uniform attention.
        viewers: how many counted queries see each key.
        counted: how many queries count: content, not padding, not the sink tokens' own rows.
    """

    sums: Float[Tensor, "batch head key"]
    expected: Float[Tensor, "batch #head key"]
    viewers: Float[Tensor, "batch #head key"]
    counted: Int[Tensor, "batch"]

    def of_rows(self, rows: Int[Tensor, "row"]) -> "ColumnStats":
        """Those of some rows of the batch."""
        return ColumnStats(self.sums[rows], self.expected[rows], self.viewers[rows], self.counted[rows])


class DeferredColumnStats:
    """Statistics that are computed when a hook asks for them, and once.

    Args:
        compute: the pass over the scores.
    """

    def __init__(self, compute: Callable[[], ColumnStats]) -> None:
        self.compute = compute
        self.found: ColumnStats | None = None

    def __call__(self) -> ColumnStats:
        """The statistics."""
        if self.found is None:
            self.found = self.compute()
        return self.found


@dataclass(frozen=True, eq=False)
class ColumnMask:
    """Columns to hide from the queries.

    A row that would end empty keeps its own position; with `keep_self` every row does. (A padding row, which
    does not see itself, stays as it was.) `renormalise` makes rows sum to 1 again behind the softmax.

    Args:
        columns: which keys go.
        stage: where.
        keep_self: every query keeps its own position.
        renormalise: rows sum to 1 again behind the softmax.
        heads: sets of heads, negative from the end; only heads that are in all of them lose anything.
        rows: only these rows of the batch lose anything; None for all.
        spare: what each query keeps of the columns, from the queries' own positions among `keys` keys.
        most: so many columns go in a map at most; None if that is not known without asking the device.
        leaves_one: of the keys that the queries of a map see, one at least stays.
        edge: only the first so many queries may end empty; None if that is not known without asking the device.
    """

    columns: Bool[Tensor, "#batch #head key"]
    stage: Stage = "before_softmax"
    keep_self: bool = False
    renormalise: bool = False
    heads: tuple[tuple[int, ...], ...] = ()
    rows: Bool[Tensor, "batch"] | None = None
    spare: Callable[[Int[Tensor, "query"], int], Bool[Tensor, "query key"]] | None = None
    most: int | None = None
    leaves_one: bool = False
    edge: int | None = None

    def only_heads(self, heads: tuple[int, ...]) -> "ColumnMask":
        """The same in some heads, nothing in the others."""
        return replace(self, heads=(*self.heads, heads))

    def only_rows(self, rows: Bool[Tensor, "batch"]) -> "ColumnMask":
        """The same in some rows of the batch, nothing in the others."""
        return replace(self, rows=rows if self.rows is None else self.rows & rows)

    def settled(self, heads: int, device: torch.device) -> "ColumnMask":
        """The same on `device` with `heads` and `rows` worked into the columns of a module of so many heads.

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
        """How many of the maps of a batch, each a row's and a head's, may lose anything."""
        chosen: int | Tensor = rows if self.rows is None else self.rows.sum()
        return chosen * len(_heads_in_all(self.heads, heads))

    def acts_in(self, rows: int, heads: int, device: torch.device) -> Bool[Tensor, "batch head"]:
        """The maps that may lose anything."""
        chosen = torch.ones(rows, 1, dtype=torch.bool, device=device)
        chosen = chosen if self.rows is None else chosen & self.rows.to(device)[:, None]
        return chosen & _head_flags(self.heads, heads, device)

    def entries(
        self, visible: Bool[Tensor, "batch #head query key"], own: Int[Tensor, "query"]
    ) -> Bool[Tensor, "batch head query key"]:
        """Entries of the pattern that go; `own` is the key of every query's own position."""
        hidden = self.columns[:, :, None, :].to(visible.device) & visible
        itself = own[:, None] == torch.arange(visible.shape[-1], device=visible.device)
        if self.spare is not None:
            hidden = hidden & ~self.spare(own, visible.shape[-1])
        if self.keep_self:
            hidden = hidden & ~itself
        # A row without any key left keeps itself, and one that does not see itself keeps all.
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
        flags[head : head + 1] = True  # a slice is filled, an index would copy from the host
    return flags


def hide_columns(hook: "ColumnHook", tensor: Tensor, context: "HookContext | None") -> Tensor:
    """Run a column hook on materialised scores or a pattern `[batch, head, query, key]`; returns the edited one.

    Raises:
        ValueError: a host put the hook at another point than its own, or attention has a cache.
    """
    _at_its_point(hook, context)
    if tensor.shape[-2] != tensor.shape[-1] and getattr(context, "run", None) is not None:
        raise ValueError(
            f"{hook}: attention has {tensor.shape[-2]} of {tensor.shape[-1]} queries, and a column is hidden from "
            "all of them; decode without a cache (use_cache=False)"
        )
    before = hook.site == "scores"
    known: AttentionPass | None = getattr(context, "attention_pass", None)
    rows: Int[Tensor, row] | None = getattr(context, "rows", None)
    after = partial(_guessed, tensor, context) if known is None else partial(known.visible, rows)
    visible = visible_in(tensor) if before else after()
    seen = visible.any((1, 2)) if known is None else known.seen_by_any(rows)
    queries = counted_queries(len(tensor), tensor.shape[2], tensor.shape[3], context, tensor.device, seen)

    def statistics() -> ColumnStats:
        pattern = (known or AttentionPass()).softmax(tensor, rows) if before else tensor.float()
        return columns_of(pattern, visible, queries)

    columns = DeferredColumnStats(statistics)
    with torch.no_grad():
        hidden = hook.hidden(tensor.shape[-1], columns, context)
    if hidden is None:
        return tensor
    hidden = hidden.settled(tensor.shape[1], tensor.device)
    count_hidden(hook, hidden, tensor.shape[0], tensor.shape[1], context, columns.found)
    entries = hidden.entries(visible, own_keys(tensor.shape[-2], tensor.shape[-1], tensor.device))
    if before:
        return tensor.masked_fill(entries, torch.finfo(tensor.dtype).min)
    if known is not None:
        known.hide(entries, rows)
    edited = tensor.masked_fill(entries, 0.0)
    if not hidden.renormalise:
        return edited
    whole = edited / edited.sum(-1, keepdim=True).clamp(min=1e-30)
    # Rows may sum to less than 1 for another reason, such as a spare entry: those of other heads stay so.
    return torch.where(
        hidden.acts_in(tensor.shape[0], tensor.shape[1], tensor.device)[..., None, None], whole, edited
    )


def _at_its_point(hook: "ColumnHook", context: "HookContext | None") -> None:
    """Raise if the host names another point: what hides scores would leave minus infinity in a pattern."""
    name, point = str(getattr(context, "name", "")), {"scores": "hook_attn_scores"}.get(hook.site, "hook_pattern")
    if name.startswith("blocks.") and not name.endswith(point):
        raise ValueError(f"{hook} belongs at {point} and was put at {name}; name that point")


def columns_of(
    pattern: Float[Tensor, "batch head query key"],
    visible: Bool[Tensor, "batch #head query key"],
    queries: Bool[Tensor, "batch query"],
) -> ColumnStats:
    """The statistics of a materialised pattern."""
    return ColumnStats(
        column_sums(pattern, queries),
        expected_received(visible, queries),
        viewers(visible, queries),
        queries.sum(-1),
    )


def _guessed(pattern: Float[Tensor, "batch head query key"], context: Any) -> Bool[Tensor, "batch #head query key"]:
    """Who sees whom where a hook is given a pattern and nothing of the pass that formed it: from its zeros.

    A single zero may be an underflow; a column of zeros is hidden (from all but itself, which a hook may have
    kept), and without a run an empty upper triangle is a causal mask. What an earlier hook hid of a column only in
    part (`keep_only`) cannot be told: the hosts of this library hand hooks an `AttentionPass`, which knows.
    """
    rows, _, queries, keys = pattern.shape
    run = getattr(context, "run", None)
    own = own_keys(queries, keys, pattern.device)[:, None]
    key = torch.arange(keys, device=pattern.device)
    positive = pattern > 0
    others = (positive & (key != own)).any(-2, keepdim=True)
    found = torch.where(key == own, positive | others, others)
    if run is None:
        later = key > own
        causal = bool(later.any()) and not bool(positive[..., later].any())
        return found & ~later if causal else found
    content = run.for_rows(rows).valid.to(pattern.device)
    layout: SinkLayout = context.sinks
    visible = visible_keys(content, causal=context.causal)
    if layout.count:
        visible = layout.restrict(layout.widen(visible), keys, pattern.device)
    return visible[..., keys - queries :, :] & found


def own_keys(queries: int, keys: int, device: torch.device) -> Int[Tensor, "query"]:
    """Each query's own position among the keys: with fewer queries (cached decoding) they are the last ones."""
    return torch.arange(keys - queries, keys, device=device)


def counted_queries(
    rows: int,
    queries: int,
    keys: int,
    context: Any,
    device: torch.device,
    seen: Bool[Tensor, "#batch key"] | None = None,
) -> Bool[Tensor, "batch query"]:
    """Queries that count: content on the canvas, never sink tokens' rows.

    The run knows what is content; without a run it is what a query sees before any hook (`seen`, None for all), so
    that padding, whose keys are hidden from every query, does not count as a query either.
    """
    layout: SinkLayout = getattr(context, "sinks", None) or SinkLayout()
    run = getattr(context, "run", None)
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
    return counted[:, keys - queries :]
