"""Statistics of a pattern in one pass over the scores: sums per key and class of queries, and numbers per query.

Received attention, a query's entropy, and what it gives to itself and to the keys before and after it follow from
the same exponentials. `pattern_stats` computes all that is wanted at once, on a CPU without normalising a pattern
(`benchmarks/recording.py`) and on a GPU in Triton kernels; `TileStats` computes the same from tiles of a pattern
that exists.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.received import run_kernels
from dlm_lens.attention.streaming import received_by_class, visibility_of
from dlm_lens.attention.tiled import (
    LOG2E,
    HeadGroup,
    Room,
    Selection,
    add_sums_,
    head_groups,
    pattern_tiles,
)

QueryStat = Literal["entropy", "self", "past", "future"]
QUERY_STATS: tuple[QueryStat, ...] = ("entropy", "self", "past", "future")
"""-sum_j A_ij ln A_ij; A_ii; the sum of A_ij over canvas keys j before i, and over those after i."""


@dataclass(frozen=True, eq=False)
class PatternStats:
    """Statistics of one layer's pattern A.

    Args:
        sums: r_cj = sum_i w_ci A_ij of every class of queries; None if there are no classes.
        per_query: the statistics of `QUERY_STATS` that were wanted; 0 for queries that do not count.
    """

    sums: Float[Tensor, "batch klass head key"] | None
    per_query: Mapping[QueryStat, Float[Tensor, "batch head query"]]


@torch.no_grad()
def pattern_stats(
    inputs: AttentionInputs,
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Collection[QueryStat] = (),
    *,
    counted: Bool[Tensor, "batch query"] | None = None,
    canvas: int | None = None,
) -> PatternStats:
    """The sums of every class and the wanted statistics of every query, without a tensor of [head, query, key].

    Args:
        inputs: of attention.
        weights: weight of every query in every class; None if no sums are wanted.
        wanted: names of `QUERY_STATS`.
        counted: queries whose statistics are wanted; None for all.
        canvas: the first so many keys are canvas positions, the others learned sink tokens; None: all.
    """
    if not wanted:
        return PatternStats(None if weights is None else received_by_class(inputs, weights), {})

    def tiles() -> PatternStats:
        stats = TileStats(inputs, weights, wanted, canvas)
        for rows, pattern in pattern_tiles(inputs):
            stats.add(rows, pattern)
        return stats.result()

    # Columns dropped after the softmax and edits of a pattern do not follow from the queries and keys.
    if inputs.pattern is not None or inputs.dropped is not None:
        return tiles()
    if inputs.q.device.type == "cpu":
        return _in_cache(inputs, weights, wanted, counted, canvas)
    return run_kernels(lambda: _in_kernels(inputs, weights, wanted, counted, canvas), tiles, inputs.q, inputs.k)


class TileStats:
    """The statistics of `pattern_stats` from tiles of a pattern, one after the other.

    Args:
        inputs, weights, wanted, canvas: as for `pattern_stats`.
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        weights: Float[Tensor, "batch klass query"] | None,
        wanted: Collection[QueryStat] = (),
        canvas: int | None = None,
    ) -> None:
        self.weights, self.start = weights, inputs.first
        self.canvas = inputs.k.shape[2] if canvas is None else canvas
        self._sums: Tensor | None = None
        self._parts: dict[QueryStat, list[Tensor]] = {name: [] for name in wanted}

    def add(self, rows: slice, pattern: Float[Tensor, "batch head tile key"]) -> None:
        """One more tile: the attention of the queries `rows`."""
        if self.weights is not None:
            sums = self.weights[:, None, :, rows] @ pattern
            self._sums = sums if self._sums is None else self._sums.add_(sums)
        if "entropy" in self._parts:
            self._parts["entropy"].append(torch.special.entr(pattern).sum(-1))
        if self._parts.keys() - {"entropy"}:
            canvas = pattern[..., : self.canvas]
            first = rows.start + self.start
            found: dict[QueryStat, Tensor] = {"self": canvas.diagonal(first, -2, -1)}
            found["past"] = canvas.tril(first - 1).sum(-1)
            found["future"] = canvas.sum(-1) - found["self"] - found["past"]
            for name, values in found.items():
                if name in self._parts:
                    self._parts[name].append(values.clone())  # the diagonal is a view of the tile

    def result(self) -> PatternStats:
        """The statistics of all tiles."""
        sums = None if self._sums is None else self._sums.transpose(1, 2)
        return PatternStats(sums, {name: torch.cat(parts, -1) for name, parts in self._parts.items()})


def _in_kernels(
    inputs: AttentionInputs,
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Collection[QueryStat],
    counted: Bool[Tensor, "batch query"] | None,
    canvas: int | None,
) -> PatternStats:
    """In Triton kernels."""
    from dlm_lens.attention.triton_kernels import triton_pattern_stats

    q, k = inputs.q, inputs.k
    visible, causal = visibility_of(inputs)
    shares = None if weights is None else weights.float()
    end = k.shape[2] if canvas is None else canvas
    sums, stats = triton_pattern_stats(q, k, inputs.scale, visible, shares, causal, inputs.first, end)
    if counted is not None:
        stats = stats.masked_fill_(~counted[:, None], 0.0)
    return PatternStats(sums, {name: stats[QUERY_STATS.index(name)] for name in wanted})


def _in_cache(
    inputs: AttentionInputs,
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Collection[QueryStat],
    counted: Bool[Tensor, "batch query"] | None,
    canvas: int | None,
) -> PatternStats:
    """In tiles that stay in a CPU's cache."""
    q, k = inputs.q, inputs.k
    batch, _, queries, keys = *q.shape[:3], k.shape[2]
    visible, causal = visibility_of(inputs)
    shares = q.new_zeros(1, 0, queries, dtype=torch.float32) if weights is None else weights.float()
    shares = shares.expand(batch, -1, -1)
    every = torch.ones(batch, queries, dtype=torch.bool) if counted is None else counted.expand(batch, -1)
    count = every | shares.ne(0).any(1)
    rows = [None if bool(each.all()) else each.nonzero().squeeze(-1) for each in count]
    sums = q.new_zeros(batch, shares.shape[1], q.shape[1], keys, dtype=torch.float32)
    found = _RowSums.of_nothing(*q.shape[:3])
    tiles = _Tiles(wanted)
    last: Selection | None = None
    for some, heads, selection, source in head_groups(q, k, inputs.scale, visible, rows, causal, inputs.lse):
        if selection is not last:  # the same for all short heads, and for all heads of a row under one mask
            where = _Places.of_selection(selection, inputs.own, keys, keys if canvas is None else canvas)
            last = selection
        own_shares = selection.shares(shares[some])
        own = sums.new_zeros(shares.shape[1], len(source.q), source.k.shape[1])
        each = _RowSums.of_nothing(*source.q.shape[:2])
        for tile, columns, scores in source.tiles():
            part = _RowSums(*each[:, :, tile].unbind())
            exponentials, divisors = tiles.reduce(source, scores, where.of(tile, columns), part)
            if len(own):
                add_sums_(own[..., columns], own_shares[..., tile], exponentials, divisors)
        selection.store(own, sums[some, :, heads])
        here = found[:, some, heads]
        queries_left = slice(None) if selection.rows is None else selection.rows
        here[..., queries_left] = each.view(*here.shape[:3], -1)
    found[0].masked_fill_(~count[:, None], 0.0)  # as if they saw no key
    return PatternStats(None if weights is None else sums, _RowSums(*found.unbind()).statistics(wanted))


@dataclass(frozen=True)
class _Places:
    """Where counted queries lie among the seen keys.

    Args:
        before: the number of seen keys before each query's own position, which never falls from row to row.
        itself: 1 where the query's own key is seen, else 0.
        canvas: the number of seen keys that are canvas positions.
    """

    before: Int[Tensor, "row"]
    itself: Float[Tensor, "row"]
    canvas: int
    _tiles: dict[tuple[int, ...], "_TilePlaces"] = field(default_factory=dict)

    @classmethod
    def of_selection(cls, selection: Selection, own: Int[Tensor, "query"], keys: int, canvas: int) -> "_Places":
        """The places of a selection's queries, which are at the positions `own`."""
        own = own if selection.rows is None else own[selection.rows]
        seen = torch.arange(keys) if selection.keys is None else selection.keys
        before = torch.searchsorted(seen, own)
        itself = torch.cat([seen, seen.new_full((1,), -1)])[before] == own
        return cls(before, itself.float(), int((seen < canvas).sum()))

    def of(self, rows: slice, columns: slice) -> "_TilePlaces":
        """The places of a tile's queries among its columns, computed once for all heads."""
        key = rows.start, rows.stop, columns.start, columns.stop
        if key not in self._tiles:
            before, canvas = self.before[rows] - columns.start, self.canvas - columns.start
            width = columns.stop - columns.start
            self._tiles[key] = _TilePlaces.of(before, self.itself[rows], canvas, width)
        return self._tiles[key]


BLOCK = 64
"""Columns of a block of a wide tile."""
NARROW = 256
"""Most columns of a tile without blocks: below, more calls cost more than fewer numbers save."""


@dataclass(frozen=True)
class _Blocks:
    """Which sums of blocks of columns are before every query of a tile.

    Args:
        whole: 1 where all of a block is before the query, else 0.
        split: the rows whose own position lies in a block, after its first column.
        inside: the columns of that block, or of the last so many, which reach over it.
    """

    whole: Float[Tensor, "tile block"]
    split: slice
    inside: Int[Tensor, "split column"]


@dataclass(frozen=True)
class _TilePlaces:
    """Where a tile's queries lie among its columns.

    The columns of a wide tile are summed in blocks, so that only the block in which a query's own position lies is
    looked at key by key.

    Args:
        blocks: of a wide tile.
        earlier: 1 where a column is before the query, else 0; of a wide tile for `blocks.inside` alone, 0 outside
            of the block. In float32: an integer takes six times as long.
        own: the column of each query itself; any column where it is not among them.
        itself: 1 where it is among them and seen, else 0.
        canvas: the number of columns that are canvas positions.
    """

    blocks: _Blocks | None
    earlier: Float[Tensor, "row column"]
    own: Int[Tensor, "tile 1"]
    itself: Float[Tensor, "tile"]
    canvas: int

    @classmethod
    def of(
        cls, before: Int[Tensor, "tile"], itself: Float[Tensor, "tile"], canvas: int, columns: int
    ) -> "_TilePlaces":
        """The places of some rows of `_Places`, where columns before the tile's count as negative."""
        own = before.clamp(0, columns - 1)
        inner, canvas = itself * (own == before), max(canvas, 0)
        if columns <= NARROW:
            earlier = before[:, None] > torch.arange(columns)
            return cls(None, earlier.float(), own[:, None], inner, canvas)
        until = before.clamp(0, columns)
        ends = torch.arange(BLOCK, columns + BLOCK, BLOCK).clamp(max=columns)
        # Rows' own positions never fall, so that the rows inside the tile's columns are neighbours.
        split = slice(int((until == 0).sum()), int((until < columns).sum()))
        end = until[split, None]
        begin = end // BLOCK * BLOCK
        inside = begin.clamp(max=columns - BLOCK) + torch.arange(BLOCK)
        earlier = (inside >= begin) & (inside < end)
        blocks = _Blocks((ends <= until[:, None]).float(), split, inside)
        return cls(blocks, earlier.float(), own[:, None], inner, canvas)


class _RowSums(NamedTuple):
    """Sums over the keys of 2^s of every query, s a base-2 score minus the row's greatest or its log-sum-exp.

    Attributes:
        total: sum_j 2^s_j; +inf or 0 where a query sees no key.
        product: sum_j 2^s_j s_j.
        past: of 2^s over the canvas keys before the query.
        itself: 2^s of the query's own key.
        sinks: of 2^s over learned sink tokens.
    """

    total: Float[Tensor, "*head query"]
    product: Float[Tensor, "*head query"]
    past: Float[Tensor, "*head query"]
    itself: Float[Tensor, "*head query"]
    sinks: Float[Tensor, "*head query"]

    @classmethod
    def of_nothing(cls, *shape: int) -> Float[Tensor, "sum *head query"]:
        """The sums of queries that see no key."""
        return torch.zeros(len(cls._fields), *shape, dtype=torch.float32)

    def statistics(self, wanted: Collection[QueryStat]) -> dict[QueryStat, Tensor]:
        """The wanted statistics."""
        empty = self.total.isinf() | (self.total == 0)
        total = self.total.masked_fill(empty, torch.inf)  # whatever is divided by it vanishes
        found: dict[QueryStat, Tensor] = {}
        if "entropy" in wanted:
            # log sum_j 2^s_j - sum_j A_ij s_j of the scores s_j, which are at most 0: both terms are positive.
            mean = self.product / total
            # Rounding of a log-sum-exp may leave less than 0.
            found["entropy"] = (total.log2() - mean).masked_fill_(empty, 0.0).clamp_(min=0.0) / LOG2E
        if len(set(wanted) - {"entropy"}):
            future = (total - self.sinks - self.past - self.itself).masked_fill_(empty, 0.0)
            regions: dict[QueryStat, Tensor] = {"self": self.itself, "past": self.past, "future": future}
            found |= {name: sums / total for name, sums in regions.items() if name in wanted}
        return found


class _Tiles:
    """The sums of one tile of base-2 scores after the other, in memory that they share."""

    def __init__(self, wanted: Collection[QueryStat]) -> None:
        self.entropy, self.regions = "entropy" in wanted, len(set(wanted) - {"entropy"}) > 0
        self._room = Room()

    def reduce(
        self, source: HeadGroup, scores: Float[Tensor, "head tile column"], places: _TilePlaces, sums: _RowSums
    ) -> tuple[Float[Tensor, "head tile column"], Float[Tensor, "head tile"] | None]:
        """Add to the sums of every row; return 2^s and what it is to be divided by, None if by nothing.

        `scores` are overwritten.
        """
        exponentials = self._room.of(*scores.shape)
        divisors = source.exponentials_(scores, exponentials)
        if self.entropy:
            sums.product.add_(scores.mul_(exponentials).sum(-1))
        total = _add_regions(exponentials, places, sums, scores) if self.regions else exponentials.sum(-1)
        sums.total.add_(total if divisors is None else divisors)  # divisors may be infinite
        return exponentials, divisors


def _add_regions(
    exponentials: Float[Tensor, "head tile column"],
    places: _TilePlaces,
    sums: _RowSums,
    room: Float[Tensor, "head tile column"],
) -> Float[Tensor, "head tile"]:
    """Add sums of exponentials at and before every query's own position, and of sinks; return those of all.

    `room` is overwritten.
    """
    if places.blocks is None:
        total = exponentials.sum(-1)
        sums.past.add_(torch.mul(exponentials, places.earlier, out=room).sum(-1))
    else:
        total = _add_blocks(exponentials, places.blocks, places.earlier, sums.past, room)
    own = places.own.expand(*exponentials.shape[:-1], 1)
    sums.itself.addcmul_(exponentials.gather(-1, own)[..., 0], places.itself)
    if places.canvas < exponentials.shape[-1]:
        sums.sinks.add_(exponentials[..., places.canvas :].sum(-1))
    return total


def _add_blocks(
    exponentials: Float[Tensor, "head tile column"],
    blocks: _Blocks,
    earlier: Float[Tensor, "split block"],
    past: Float[Tensor, "head tile"],
    room: Float[Tensor, "head tile column"],
) -> Float[Tensor, "head tile"]:
    """Add sums of exponentials before every query's own position to `past`, by blocks; return those of all."""
    count = exponentials.shape[-1] // BLOCK
    sums = exponentials[..., : count * BLOCK].unflatten(-1, (count, BLOCK)).sum(-1)
    if count < blocks.whole.shape[-1]:
        sums = torch.cat([sums, exponentials[..., count * BLOCK :].sum(-1, keepdim=True)], -1)
    past.add_((sums * blocks.whole).sum(-1))
    if len(blocks.inside):
        inside = exponentials[:, blocks.split].gather(-1, blocks.inside.expand(len(exponentials), -1, -1))
        out = room[:, blocks.split, :BLOCK]
        past[:, blocks.split].add_(torch.mul(inside, earlier, out=out).sum(-1))
    return sums.sum(-1)
