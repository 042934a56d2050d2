"""Statistics of a pattern in one pass over the scores: sums per key and class of queries, and numbers per query.

Received attention, a query's entropy, and what it gives to itself and to the keys before and after it follow from
the same exponentials. `pattern_stats` computes all that is wanted at once, on a CPU without normalising a pattern
(`benchmarks/recording.py`) and on a GPU in Triton kernels; `TileStats` computes the same from tiles of a pattern
that exists.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.kernel_selection import run_kernels
from dlm_lens.attention.streaming import received_by_class, row_lse, visibility_of
from dlm_lens.attention.tile_sums import QUERY_STATS, CountedQueries, QueryStat, sums_in_tiles
from dlm_lens.attention.tiled import pattern_tiles
from dlm_lens.placement import without_autocast


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
        stats = tiles()
    elif inputs.q.device.type == "cpu":
        stats = _in_cache(inputs, weights, wanted, counted, canvas)
    elif inputs.spare is not None:  # the kernels normalise rows themselves
        stats = tiles()
    else:
        stats = run_kernels(lambda: _in_kernels(inputs, weights, wanted, canvas), tiles, inputs.q, inputs.k)
    if counted is None:
        return stats
    others = ~counted[:, None]
    return PatternStats(stats.sums, {name: each.masked_fill(others, 0.0) for name, each in stats.per_query.items()})


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
            with without_autocast(pattern.device):
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
    canvas: int | None,
) -> PatternStats:
    from dlm_lens.attention.triton_kernels import triton_pattern_stats

    q, k = inputs.q, inputs.k
    visible, causal = visibility_of(inputs)
    shares = None if weights is None else weights.float()
    end = k.shape[2] if canvas is None else canvas
    sums, stats = triton_pattern_stats(q, k, inputs.scale, visible, shares, causal, inputs.first, end)
    return PatternStats(sums, {name: stats[QUERY_STATS.index(name)] for name in wanted})


def _in_cache(
    inputs: AttentionInputs,
    weights: Float[Tensor, "batch klass query"] | None,
    wanted: Collection[QueryStat],
    counted: Bool[Tensor, "batch query"] | None,
    canvas: int | None,
) -> PatternStats:
    """In tiles that stay in a CPU's cache."""
    q, keys = inputs.q, inputs.k.shape[2]
    visible, causal = visibility_of(inputs)
    shares = q.new_zeros(1, 0, q.shape[2], dtype=torch.float32) if weights is None else weights.float()
    every = torch.ones(1, q.shape[2], dtype=torch.bool) if counted is None else counted
    queries = CountedQueries(every | shares.ne(0).any(1), inputs.own, keys if canvas is None else canvas, wanted)
    sums, rows = sums_in_tiles(q, inputs.k, inputs.scale, visible, shares, causal, row_lse(inputs), queries)
    return PatternStats(None if weights is None else sums, rows.statistics(wanted, of_one=inputs.spare is None))
