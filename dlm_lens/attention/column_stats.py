"""Column statistics of attention patterns: received attention of a key, and its uniform expectation.

The scale is the design's choice for Eq. 3 of 2510.15731: received attention relative to uniform attention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.placement import without_autocast

MIN_VIEWERS = 8
"""A key seen by fewer counted queries has no defined score: a few rows are noise, not a sink."""
LEAST_SELECTED = 256
"""Fewest keys of which `largest` selects some; of fewer it sorts all."""


def _weights(queries: Bool[Tensor, "*batch query"]) -> Float[Tensor, "*batch 1 1 query"]:
    return queries[..., None, None, :].float()


def _summed(
    entries: Float[Tensor, "*batch head query key"], queries: Bool[Tensor, "*batch query"]
) -> Float[Tensor, "*batch head key"]:
    """The sum over the counted queries, in float32."""
    with without_autocast(entries.device):
        return (_weights(queries) @ entries.float()).squeeze(-2)


def column_sums(
    pattern: Float[Tensor, "*batch head query key"], queries: Bool[Tensor, "*batch query"] | None = None
) -> Float[Tensor, "*batch head key"]:
    """Attention that each key receives, r_j = sum_i A_ij over the counted queries (all by default).

    In a full pass r_j = S * A-bar_j with the A-bar of 2510.15731, section 4.1. Accumulated in float32.
    """
    if queries is None:
        return pattern.sum(-2, dtype=torch.float32)
    return _summed(pattern, queries)


def expected_received(
    visible: Bool[Tensor, "*batch heads query key"], queries: Bool[Tensor, "*batch query"] | None = None
) -> Float[Tensor, "*batch heads key"]:
    """Received attention of key j under uniform attention: e_j = sum_i M_ij / sum_k M_ik.

    1 for every visible key of a bidirectional pass; H_S - H_j (harmonic numbers) for key j of a causal one.
    """
    seen = visible.sum(-1, keepdim=True).clamp(min=1)
    uniform = visible.float() / seen
    if queries is None:
        return uniform.sum(-2)
    return _summed(uniform, queries)


def viewers(
    visible: Bool[Tensor, "*batch heads query key"], queries: Bool[Tensor, "*batch query"] | None = None
) -> Float[Tensor, "*batch heads key"]:
    """How many counted queries see each key."""
    if queries is None:
        return visible.sum(-2, dtype=torch.float32)
    return _summed(visible, queries)


def received_attention(
    pattern: Float[Tensor, "*batch head query key"],
    *,
    visible: Bool[Tensor, "*batch #head query key"] | None = None,
    queries: Bool[Tensor, "*batch query"] | None = None,
    relative: bool = True,
    min_viewers: int = MIN_VIEWERS,
) -> Float[Tensor, "*batch head key"]:
    """Received attention of every key, relative to uniform attention: score_j = r_j / e_j.

    1 means as much as under uniform attention. `relative=False` gives the raw column sum r_j, the paper's
    A-bar_j times the number of queries (2510.15731, section 4.1). NaN where a key is undefined: seen by fewer
    than `min_viewers` counted queries (padding among them).

    Args:
        pattern: attention probabilities, rows sum to 1.
        visible: M, which query sees which key; None if every query sees every key.
        queries: which queries count; None for all. Padding and sink tokens' own rows should not.
        relative: divide by the uniform expectation.
        min_viewers: fewest counted queries that must see a key.
    """
    if visible is None:
        visible = pattern.new_ones(pattern.shape[-2:], dtype=torch.bool).expand(
            *pattern.shape[:-3], 1, *pattern.shape[-2:]
        )
    received = column_sums(pattern, queries)
    if relative:
        received = received / expected_received(visible, queries)
    return received.masked_fill(viewers(visible, queries) < min_viewers, torch.nan)


def top_columns(
    received: Float[Tensor, "*batch key"], k: int, valid: Bool[Tensor, "*batch key"] | None = None
) -> Bool[Tensor, "*batch key"]:
    """Mask of the k keys that receive most, among the valid and defined (not NaN) ones.

    Where fewer than k are defined, all of them. Of equal scores the earlier position wins.

    Raises:
        ValueError: k is not positive.
    """
    if k < 1:
        raise ValueError(f"top_columns needs k of at least 1, got {k}")
    defined = ~received.isnan() if valid is None else ~received.isnan() & valid
    _, order = largest(received.masked_fill(~defined, -torch.inf), k)
    chosen = torch.zeros_like(defined).scatter(-1, order, True)
    return chosen & defined


def largest(
    scores: Float[Tensor, "*batch key"], k: int
) -> tuple[Float[Tensor, "*batch rank"], Int[Tensor, "*batch rank"]]:
    """The k greatest scores of every row (all if there are fewer) in falling order, and their positions.

    Of equal scores the earlier position comes first. No score may be NaN.
    """
    keys = scores.shape[-1]
    if scores.dtype != torch.float32 or keys < LEAST_SELECTED:
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], order[..., :k]
    # A float32 and its position in one integer, in the order of both, so that a selection need not sort all keys.
    # 0.0 makes 0 of -0.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats fall as their bits rise
    later_first = torch.arange(keys - 1, -1, -1, device=scores.device)
    picked = ((ordered.long() << 32) | later_first).topk(min(k, keys), dim=-1).values
    positions = keys - 1 - (picked & 0xFFFFFFFF)
    return scores.gather(-1, positions), positions


@dataclass(frozen=True, eq=False)
class ColumnStats:
    """What the keys of one layer receive at one step, in the network's order of positions.

    Args:
        sums: r_j = sum_i A_ij over the counted queries.
        expected: e_j, the same under uniform attention.
        viewers: how many counted queries see each key.
        counted: how many queries count: content, not padding, not the rows of learned sink tokens.
        queries: how many queries the pass has, padding among them; None where it is not known.
    """

    sums: Float[Tensor, "batch head key"]
    expected: Float[Tensor, "batch #head key"]
    viewers: Float[Tensor, "batch #head key"]
    counted: Int[Tensor, "batch"]
    queries: int | None = None

    def of_rows(self, rows: Int[Tensor, "row"]) -> "ColumnStats":
        """The statistics of some rows of the batch."""
        return ColumnStats(
            self.sums[rows], self.expected[rows], self.viewers[rows], self.counted[rows], self.queries
        )


class DeferredColumnStats:
    """Statistics that are computed at the first call and kept.

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


def columns_of(
    pattern: Float[Tensor, "batch head query key"],
    visible: Bool[Tensor, "batch #head query key"],
    queries: Bool[Tensor, "batch query"],
) -> ColumnStats:
    """The statistics of a materialised pattern over the counted queries; `visible` is M of `expected_received`."""
    return ColumnStats(
        column_sums(pattern, queries),
        expected_received(visible, queries),
        viewers(visible, queries),
        queries.sum(-1),
        queries.shape[-1],
    )
