"""Sums of one tile of base-2 scores: of powers of 2 and their products per query, and per key and class of queries.

Calls of torch make several passes over a tile. Where numba is installed and torch has few threads, one compiled
loop makes one (`numba_kernels`), with the same numbers but for rounding.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.kernel_selection import compiled_reduction
from dlm_lens.attention.tiled import (
    HIDDEN,
    LOG2E,
    HeadGroup,
    Room,
    Selection,
    add_sums_,
    batched_received_sums,
    head_groups,
    needs_grad,
)

QueryStat = Literal["entropy", "self", "past", "future"]
QUERY_STATS: tuple[QueryStat, ...] = ("entropy", "self", "past", "future")
"""-sum_j A_ij ln A_ij; A_ii; the sum of A_ij over canvas keys j before i, and over those after i."""


@dataclass(frozen=True)
class Places:
    """Where counted queries lie among the seen keys.

    Args:
        before: the number of seen keys before each query's own position, which never falls from row to row.
        itself: 1 where the query's own key is seen, else 0.
        canvas: the number of seen keys that are canvas positions.
    """

    before: Int[Tensor, "row"]
    itself: Float[Tensor, "row"]
    canvas: int
    _tiles: dict[tuple[int, ...], "TilePlaces"] = field(default_factory=dict)

    @classmethod
    def of_selection(cls, selection: Selection, queries: "CountedQueries", keys: int) -> "Places":
        """The places of a selection's queries; anywhere if nothing is wanted of them."""
        own = queries.own if selection.rows is None else queries.own[selection.rows]
        if not queries.wanted:
            return cls(own.new_zeros(len(own)), torch.zeros(len(own), dtype=torch.float32), keys)
        if selection.keys is None:  # every key is seen
            return cls(own.clamp(0, keys), ((own >= 0) & (own < keys)).float(), min(keys, queries.canvas))
        seen = selection.keys
        before = torch.searchsorted(seen, own)
        itself = torch.cat([seen, seen.new_full((1,), -1)])[before] == own
        return cls(before, itself.float(), int((seen < queries.canvas).sum()))

    def of(self, rows: slice, columns: slice) -> "TilePlaces":
        """The places of a tile's queries among its columns, computed once for all heads."""
        key = rows.start, rows.stop, columns.start, columns.stop
        if key not in self._tiles:
            before, canvas = self.before[rows] - columns.start, self.canvas - columns.start
            width = columns.stop - columns.start
            self._tiles[key] = TilePlaces.of(before, self.itself[rows], canvas, width)
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
class TilePlaces:
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
    ) -> "TilePlaces":
        """The places of some rows of `Places`, where columns before the tile's count as negative."""
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


class RowSums(NamedTuple):
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

    def statistics(self, wanted: Collection[QueryStat], *, of_one: bool = True) -> dict[QueryStat, Tensor]:
        """The wanted statistics.

        Args:
            wanted: their names.
            of_one: rows of the pattern sum to 1; else 2^s is the pattern, whose rows have a spare entry.
        """
        empty = self.total.isinf() | (self.total == 0)
        found: dict[QueryStat, Tensor] = {}
        if not of_one:
            future = self.total - self.sinks - self.past - self.itself
            sums: dict[QueryStat, Tensor] = {"entropy": -self.product / LOG2E, "self": self.itself}
            sums |= {"past": self.past, "future": future}
            return {name: each.masked_fill(empty, 0.0) for name, each in sums.items() if name in wanted}
        total = self.total.masked_fill(empty, torch.inf)  # whatever is divided by it vanishes
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


@dataclass(frozen=True)
class CountedQueries:
    """Which queries count, and what is wanted of them.

    Args:
        counted: whether each counts; what is not needed of the others is left out.
        own: their positions among the keys.
        canvas: the first so many keys are canvas positions.
        wanted: the statistics of queries.
    """

    counted: Bool[Tensor, "#batch query"]
    own: Int[Tensor, "query"]
    canvas: int
    wanted: Collection[QueryStat] = ()


def sums_in_tiles(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    weights: Float[Tensor, "#batch klass query"],
    causal: bool,
    lse: Float[Tensor, "batch head query"] | None,
    queries: CountedQueries,
) -> tuple[Float[Tensor, "batch klass head key"], RowSums]:
    """The sums of every key by class, and those of every query, in tiles that stay in a CPU's cache.

    Arguments as for `received_sums`.
    """
    batch, heads, keys = len(q), q.shape[1], k.shape[2]
    count, weights = queries.counted.expand(batch, -1), weights.expand(batch, -1, -1)
    rows = [None if bool(each.all()) else each.nonzero().squeeze(-1) for each in count]
    sums = q.new_zeros(batch, weights.shape[1], heads, keys, dtype=torch.float32)
    found = RowSums.of_nothing(*q.shape[:3])
    tiles = tile_sums(queries.wanted, q.shape[2] * keys, scale)
    last: Selection | None = None
    groups = head_groups(q, k, scale, visible, rows, causal, lse, tiles.folded)
    for some, chosen, selection, source in groups:
        if selection is not last:  # the same for all short heads, and for all heads of a row under one mask
            places = Places.of_selection(selection, queries, keys)
            last = selection
        shares = selection.shares(weights[some])
        # Of one row of the batch with all keys, or all queries, sums are added where they belong.
        one = some.stop - some.start == 1
        all_keys, all_queries = one and selection.keys is None, one and selection.rows is None
        own, each = sums[some.start, :, chosen], found[:, some.start, chosen]
        if not all_keys:
            own = sums.new_zeros(sums.shape[1], len(source.q), source.k.shape[1])
        if not all_queries:
            each = RowSums.of_nothing(*source.q.shape[:2])
        tiles.add(source, GroupSums(each, own, shares, places))
        if not all_keys:
            selection.store(own, sums[some, :, chosen])
        if not all_queries:
            here = found[:, some, chosen]
            here[..., slice(None) if selection.rows is None else selection.rows] = each.view(*here.shape[:3], -1)
    found[0].masked_fill_(~count[:, None], 0.0)  # as if they saw no key
    return sums, RowSums(*found.unbind())


def tiled_received_sums(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    weights: Float[Tensor, "#batch klass query"],
    causal: bool,
    lse: Float[Tensor, "batch head query"] | None = None,
) -> Float[Tensor, "batch klass head key"]:
    """`received_sums` in tiles of torch, on any device."""
    if needs_grad(q, k, weights):
        return batched_received_sums(q, k, scale, visible, weights, causal)
    if q.device.type != "cpu":
        return batched_received_sums(q, k, scale, visible, weights, causal, lse)
    queries = CountedQueries(weights.ne(0).any(1), torch.arange(q.shape[2]), k.shape[2])
    return sums_in_tiles(q, k, scale, visible, weights, causal, lse, queries)[0]


@dataclass(frozen=True)
class GroupSums:
    """The sums of a group of heads, to which its tiles are added.

    Args:
        rows: of its queries, the fields of `RowSums`.
        columns: of its keys by class of queries, sum_i w_ci A_ij.
        weights: of its queries in every class, row by row of the batch.
        places: of its queries among its keys.
    """

    rows: Float[Tensor, "sum head row"]
    columns: Float[Tensor, "klass head column"]
    weights: Float[Tensor, "batch klass row"]
    places: Places


class TileSums(Protocol):
    """Adds up the tiles of groups of heads, one group after the other.

    Attributes:
        folded: whether it reads scores; else products of queries and keys, and `HeadGroup.factor` and `.offset`.
    """

    folded: bool

    def add(self, source: HeadGroup, sums: GroupSums) -> None:
        """Add all tiles of a group of heads to its sums."""


def tile_sums(wanted: Collection[QueryStat], entries: int, scale: float) -> TileSums:
    """What adds up the tiles: numba's code where it is there and worth loading, else calls of torch.

    Args:
        wanted: the statistics of queries.
        entries: of a head's pattern.
        scale: of the scores.
    """
    # Numba's loop subtracts the greatest product of a row, which is the greatest score if the scale is positive.
    reduce = compiled_reduction(entries, bool(wanted)) if scale > 0 else None
    return TorchSums(wanted) if reduce is None else CompiledSums(reduce)


class CompiledSums:
    """The sums of one tile after the other in one loop over its rows (`numba_kernels`), in one thread.

    Args:
        reduce: the compiled `reduce_tile`.
    """

    folded = False

    def __init__(self, reduce: Callable[..., None]) -> None:
        self._reduce = reduce

    def add(self, source: HeadGroup, sums: GroupSums) -> None:
        """Add all tiles of a group of heads to its sums."""
        offset = source.q.new_zeros(source.q.shape[:2]) if source.offset is None else source.offset
        places = sums.places
        arrays = [each.numpy() for each in (places.before, places.itself, sums.weights, sums.rows, sums.columns)]
        offsets = offset.numpy()
        for rows, columns, products in source.tiles():
            if source.offset is None:
                offset[:, rows] = products.amax(-1)
            self._reduce(
                products.numpy(),
                offsets,
                source.factor,
                source.normalised,
                -HIDDEN / 2,
                rows.start,
                columns.start,
                places.canvas,
                *arrays,
            )


class TorchSums:
    """The sums of one tile after the other in calls of torch, in memory that they share.

    Args:
        wanted: the statistics of queries.
    """

    folded = True

    def __init__(self, wanted: Collection[QueryStat]) -> None:
        self.entropy, self.regions = "entropy" in wanted, len(set(wanted) - {"entropy"}) > 0
        self._room = Room()

    def add(self, source: HeadGroup, sums: GroupSums) -> None:
        """Add all tiles of a group of heads to its sums."""
        for rows, columns, scores in source.tiles():
            if self.entropy or self.regions:
                where = sums.places.of(rows, columns) if self.regions else None
                exponentials, divisors = self._with_rows(
                    source, scores, where, RowSums(*sums.rows[:, :, rows].unbind())
                )
            else:
                exponentials, divisors = scores, source.exponentials_(scores)
            if len(sums.columns):
                add_sums_(sums.columns[..., columns], sums.weights[..., rows], exponentials, divisors)

    def _with_rows(
        self,
        source: HeadGroup,
        scores: Float[Tensor, "head tile column"],
        where: TilePlaces | None,
        sums: RowSums,
    ) -> tuple[Float[Tensor, "head tile column"], Float[Tensor, "head tile"] | None]:
        """Add to the sums of every row; return 2^s and what it is to be divided by, None if by nothing.

        `scores` are overwritten.
        """
        exponentials = self._room.of(*scores.shape)
        divisors = source.exponentials_(scores, exponentials)
        if self.entropy:
            sums.product.add_(scores.mul_(exponentials).sum(-1))
        total = exponentials.sum(-1) if where is None else _add_regions(exponentials, where, sums, scores)
        sums.total.add_(total if divisors is None else divisors)  # divisors may be infinite
        return exponentials, divisors


def _add_regions(
    exponentials: Float[Tensor, "head tile column"],
    places: TilePlaces,
    sums: RowSums,
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
