"""Statistics of a pattern in one pass over the scores: sums per key and class of queries, and numbers per query.

Received attention, a query's entropy, and what it gives to itself and to the keys before and after it follow from
the same exponentials. `pattern_stats` computes all that is wanted at once, on a CPU without normalising a pattern
(`benchmarks/recording.py`); `TileStats` computes the same from tiles of a pattern that exists.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.streaming import received_by_class, visibility_of
from dlm_lens.attention.tiled import (
    HIDDEN,
    LOG2E,
    Selection,
    add_sums_,
    head_groups,
    needs_grad,
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
    on_cpu = inputs.q.device.type == "cpu" and not needs_grad(inputs.q, inputs.k)
    if on_cpu and inputs.pattern is None and inputs.dropped is None:
        return _in_cache(inputs, weights, wanted, counted, canvas)
    stats = TileStats(inputs, weights, wanted, canvas)
    for rows, pattern in pattern_tiles(inputs):
        stats.add(rows, pattern)
    return stats.result()


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
    found = {name: q.new_zeros(q.shape[:3], dtype=torch.float32) for name in wanted}
    tiles = _Tiles(wanted)
    last: Selection | None = None
    for row, heads, selection, source in head_groups(q, k, inputs.scale, visible, rows, causal):
        if selection is not last:  # the same for all heads, unless the mask differs between them
            where = _Places.of(selection, inputs.own, keys, keys if canvas is None else canvas)
            last = selection
        share = shares[row] if selection.rows is None else shares[row][:, selection.rows]
        own = sums.new_zeros(len(share), len(source.q), source.k.shape[1])
        each = {name: values.new_zeros(source.q.shape[:2]) for name, values in found.items()}
        for tile, columns, scores in source.tiles():
            total, exponentials, numbers = tiles.reduce(scores, where.of_rows(tile))
            if len(share):
                add_sums_(own[..., columns], share[:, tile], exponentials, total)
            for name, values in numbers.items():
                each[name][:, tile] = values
        seen = slice(None) if selection.keys is None else selection.keys
        sums[row, :, heads][..., seen] = own
        queries_of = slice(None) if selection.rows is None else selection.rows
        for name, values in each.items():
            found[name][row, heads][:, queries_of] = values
    return PatternStats(None if weights is None else sums, found)


@dataclass(frozen=True)
class _Places:
    """Where counted queries lie among the seen keys.

    Args:
        before: the number of seen keys before each query's own position.
        itself: 1 where the query's own key is seen, else 0.
        canvas: the number of seen keys that are canvas positions.
    """

    before: Int[Tensor, "row"]
    itself: Float[Tensor, "row"]
    canvas: int

    @classmethod
    def of(cls, selection: Selection, own: Int[Tensor, "query"], keys: int, canvas: int) -> "_Places":
        """The places of a selection's queries, which are at the positions `own`."""
        own = own if selection.rows is None else own[selection.rows]
        seen = torch.arange(keys) if selection.keys is None else selection.keys
        before = torch.searchsorted(seen, own)
        itself = torch.cat([seen, seen.new_full((1,), -1)])[before] == own
        return cls(before, itself.float(), int((seen < canvas).sum()))

    def of_rows(self, rows: slice) -> "_Places":
        """The places of some of the queries."""
        return _Places(self.before[rows], self.itself[rows], self.canvas)


class _Tiles:
    """The numbers per query of one tile of base-2 scores after the other, in buffers that they share."""

    def __init__(self, wanted: Collection[QueryStat]) -> None:
        self.wanted = wanted
        self._exponentials, self._earlier = torch.empty(0), torch.empty(0)

    def reduce(
        self, scores: Float[Tensor, "head tile column"], places: _Places
    ) -> tuple[
        Float[Tensor, "head tile"],
        Float[Tensor, "head tile column"],
        dict[QueryStat, Float[Tensor, "head tile"]],
    ]:
        """Row sums of 2^(score - maximum), these exponentials, and what is wanted; `scores` are overwritten.

        The sum of a row that is hidden entirely is +inf, so that whatever is divided by it vanishes.
        """
        top = scores.amax(-1, keepdim=True)
        self._exponentials = _at_least(scores.numel(), self._exponentials)
        exponentials = self._exponentials[: scores.numel()].view(scores.shape)
        torch.exp2(scores.sub_(top), out=exponentials)
        empty = top[..., 0] < -HIDDEN / 2
        whole = exponentials.sum(-1)
        total = whole.masked_fill(empty, torch.inf)
        found: dict[QueryStat, Tensor] = {}
        if "entropy" in self.wanted:
            # log sum_j 2^s_j - sum_j A_ij s_j of the scores s_j, which are at most 0: both terms are positive.
            mean = scores.mul_(exponentials).sum(-1) / total
            found["entropy"] = (total.log2() - mean).masked_fill_(empty, 0.0) / LOG2E
        if len(set(self.wanted) - {"entropy"}):
            regions = self._regions(exponentials, whole, places, room=scores)
            found |= {name: sums / total for name, sums in regions.items() if name in self.wanted}
        return total, exponentials, found

    def _regions(
        self,
        exponentials: Float[Tensor, "head tile column"],
        whole: Float[Tensor, "head tile"],
        places: _Places,
        room: Float[Tensor, "head tile column"],
    ) -> dict[QueryStat, Float[Tensor, "head tile"]]:
        """Sums of exponentials at, before and after every query's own position; `room` is overwritten."""
        columns = exponentials.shape[-1]
        # 1 where a key is before the query, in float32 (exact up to 16 million): integers take six times as long.
        self._earlier = _at_least(room[0].numel(), self._earlier)
        earlier = self._earlier[: room[0].numel()].view(room.shape[1:])
        torch.gt(places.before[:, None].float(), torch.arange(columns, dtype=torch.float32), out=earlier)
        past = torch.mul(exponentials, earlier, out=room).sum(-1)
        own = places.before.clamp(max=columns - 1)[:, None].expand(*exponentials.shape[:-1], 1)
        itself = exponentials.gather(-1, own).squeeze(-1) * places.itself
        sinks = exponentials[..., places.canvas :].sum(-1)
        return {"self": itself, "past": past, "future": whole - sinks - past - itself}


def _at_least(size: int, buffer: Tensor) -> Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size)
