"""The pattern and its statistics in tiles of torch, without a tensor of [head, query, key].

On a CPU the loop goes over tiles that stay in the cache: some rows of one head, or several heads of a short canvas.
From 256 positions on that costs 0.35 to 1.2 times the fused attention of the same layer, by processor and length
(`benchmarks/received.py`). Five choices keep it low: powers of 2 (torch's exp2 is vectorised by itself, its exp
goes through MKL at a quarter of the speed on an AMD machine with AVX-512), there oneDNN's matrix product for long
heads (twice as fast as MKL's) and else one memory for all tiles, normalisation, query classes and the sum over
queries in one small product, and the log-sum-exp of the fused kernel where it is known: with it no row's maximum is
looked for, a tile need not hold whole rows, and the product subtracts it.
"""

import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.softmax_variants import softmax
from dlm_lens.placement import without_autocast

TILE_ELEMENTS = 1 << 19
"""Elements of a CPU tile of one head, 2 MiB of float32: smaller ones starve the matrix product."""
SHARED_TILE_ELEMENTS = 1 << 18
"""Elements of a CPU tile of several heads, 1 MiB of float32."""
SHORT_HEAD = 1 << 16
"""Most entries of a head that shares a tile with others: below, torch's calls cost more than the numbers."""
TILE_COLUMNS = 512
"""Most keys of a CPU tile of one head where the log-sum-exp of its queries is known."""
CAUSAL_ROWS = 256
"""Most rows of a causal tile on a CPU: what lies above the diagonal is computed and discarded."""
BATCHED_ELEMENTS = 1 << 24
"""Elements of a tile over all rows and heads, off the CPU or under autograd: 64 MiB of float32."""
HIDDEN = 1e38
"""What is subtracted from a hidden score; finite, since 0 * inf is not a number."""
LOG2E = math.log2(math.e)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd would record what is computed from `tensors`."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@cache
def _onednn_linear() -> Any:
    """OneDNN's product x w^T of dense float32 matrices, or None: inductor calls the same operator.

    With AVX-512 on a processor that is not Intel's, where MKL does not use it. Elsewhere MKL's is as fast, and
    takes the memory of its result from the caller.
    """
    supported = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if supported and not _of_intel() else None


def _of_intel() -> bool:
    """Whether the processor says that it is Intel's; False where it does not say."""
    facts = Path("/proc/cpuinfo")
    try:
        text = facts.read_text(encoding="utf-8", errors="replace") if facts.exists() else platform.processor()
    except OSError:
        return False
    return "GenuineIntel" in text


def score_tile(
    q: Float[Tensor, "tile d_head"], k: Float[Tensor, "key d_head"], out: Float[Tensor, "tile key"]
) -> Float[Tensor, "tile key"]:
    """The product q k^T of float32 matrices on a CPU, without a gradient, in `out` or in new memory.

    They are to be contiguous where oneDNN multiplies (`_onednn_linear`).
    """
    linear = _onednn_linear()
    if linear is not None:
        scores: Tensor = linear(q, k, None, "none", [], "")
        return scores
    return torch.mm(q, k.mT, out=out)


class Room:
    """Memory that tiles use one after the other; the first use of new memory costs time, page by page."""

    def __init__(self) -> None:
        self._memory = self._last = torch.empty(0, dtype=torch.float32)

    def of(self, *shape: int) -> Tensor:
        """A tensor of this shape in the memory, whose values are those of its last use."""
        if self._last.shape != shape:
            size = math.prod(shape)
            if self._memory.numel() < size:
                self._memory = self._memory.new_empty(size)
            self._last = self._memory[:size].view(shape)
        return self._last


def exponentials_(
    scores: Float[Tensor, "*head tile key"], out: Float[Tensor, "*head tile key"] | None = None
) -> tuple[Float[Tensor, "*head tile 1"], Float[Tensor, "*head tile"]]:
    """Replace base-2 `scores` by 2^(score - row maximum), in place; return the maxima and the row sums.

    With `out` the exponentials are written there, and `scores` become score - row maximum. The sum of a row that is
    hidden entirely is +inf, so that whatever is divided by it vanishes.
    """
    top = scores.amax(-1, keepdim=True)
    total = torch.exp2(scores.sub_(top), out=scores if out is None else out).sum(-1)
    return top, total.masked_fill_(top[..., 0] < -HIDDEN / 2, torch.inf)


def add_sums_(
    sums: Float[Tensor, "klass head key"],
    weights: Float[Tensor, "batch klass tile"],
    tile: Float[Tensor, "head tile key"],
    total: Float[Tensor, "head tile"] | None,
) -> None:
    """Add the sums of a tile over its queries, sum_i w_ci / total_i tile_ij, in place; without `total` it is 1.

    The heads are those of the batch row by row. Head by head, with new weights each: the last bits of a product
    depend on where its operands lie in memory, and that must not depend on how many classes there are.
    """
    each = len(tile) // len(weights)
    for head, (own, pattern) in enumerate(zip(sums.unbind(1), tile.unbind(), strict=True)):
        share = weights[head // each]
        own.addmm_(share if total is None else share / total[head], pattern)


def hide_(scores: Float[Tensor, "*head tile key"], hidden: UInt8[Tensor, "*#head #tile key"]) -> None:
    """Push the hidden (1) entries of `scores` so low that their exponential is 0, in place.

    An addition, because `masked_fill_` with an irregular mask takes as long as everything else together.
    """
    scores.sub_(hidden.float(), alpha=HIDDEN)


@dataclass(frozen=True)
class HeadGroup:
    """Query heads of rows of the batch, as many of each row, with some of their queries and keys.

    Args:
        q: queries; where `folded` in base-2 units of the scores and, where `normalised` too, beside them minus the
            base-2 log-sum-exp of each query's scores.
        k: the keys that each of them reads; where `folded` and `normalised`, beside them 1.
        keys: positions of the columns; None where all are left.
        hidden: the hidden (1) entries among them, for all heads of each row of the batch or by head; None: none is.
        last: the last position that each query sees (causal); None where nothing is hidden so.
        normalised: whether the log-sum-exp of each query's scores is known. It is then subtracted in the product
            q k^T itself, since another pass over a tile takes a quarter of the product's time.
        room: for the scores of a tile.
        folded: whether the product has the scale and the log-sum-exp in it. Otherwise it is q k^T as it is, without
            copies of q and k, and the scores are (q k^T - `offset`) times `factor`.
        factor: base-2 units of a score in one unit of the product; 1 where `folded`.
        offset: the log-sum-exp in units of the product, where it is known and not `folded`.
    """

    q: Float[Tensor, "head row width"]
    k: Float[Tensor, "head column width"]
    keys: Int[Tensor, "column"] | None
    hidden: UInt8[Tensor, "batch #head #row column"] | None
    last: Int[Tensor, "row"] | None
    normalised: bool
    room: Room
    folded: bool = True
    factor: float = 1.0
    offset: Float[Tensor, "head row"] | None = None

    def tiles(self) -> Iterator[tuple[slice, slice, Float[Tensor, "head tile column"]]]:
        """Base-2 scores tile by tile, hidden ones near -HIDDEN: which rows, which columns, the scores.

        Where not `folded` they are products q k^T. Where `normalised` they are base-2 logarithms of the pattern,
        and a tile has some of the columns; elsewhere it has all of those that one of its rows sees. The next tile
        overwrites them.
        """
        heads, count, columns = *self.q.shape[:2], self.k.shape[1]
        if not count or not columns:
            return
        width = columns
        if self.normalised:
            width = math.ceil(columns / math.ceil(columns / TILE_COLUMNS))
        size = max(1, TILE_ELEMENTS // (heads * width))
        size = min(size if self.last is None else min(size, CAUSAL_ROWS), count)
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            seen = columns if self.last is None else self._columns_until(int(self.last[rows.stop - 1]))
            for first in range(0, seen, width):
                part = slice(first, min(first + width, seen))
                yield rows, part, self._scores(rows, part)

    def exponentials_(
        self, scores: Float[Tensor, "head tile column"], out: Float[Tensor, "head tile column"] | None = None
    ) -> Float[Tensor, "head tile"] | None:
        """2^scores of a tile, up to a factor of each row; what they are to be divided by, None if by nothing.

        In place, or in `out`: then `scores` become the logarithms of what is there.
        """
        if not self.normalised:
            return exponentials_(scores, out)[1]
        torch.exp2(scores, out=scores if out is None else out)
        return None

    def _scores(self, rows: slice, columns: slice) -> Float[Tensor, "head tile column"]:
        """The scores of some rows and columns."""
        out = self.room.of(len(self.q), rows.stop - rows.start, columns.stop - columns.start)
        q, k = self.q[:, rows], self.k[:, columns]
        scores = score_tile(q[0], k[0], out[0])[None] if len(q) == 1 else torch.bmm(q, k.mT, out=out)
        if self.hidden is not None:
            hidden = self.hidden if self.hidden.shape[2] == 1 else self.hidden[:, :, rows]
            hide_(scores.unflatten(0, (len(hidden), -1)), hidden[..., columns])
        if self.last is not None:
            self._hide_later_(scores, self.last[rows], columns)
        return scores

    def _columns_until(self, position: int) -> int:
        """How many columns are at `position` or before."""
        if self.keys is None:
            return max(0, min(position + 1, self.k.shape[1]))
        return int(torch.searchsorted(self.keys, position, right=True))

    def _hide_later_(
        self, scores: Float[Tensor, "head tile column"], last: Int[Tensor, "tile"], columns: slice
    ) -> None:
        # Every row of the tile sees the columns up to the first row's last one; only the others need a mask.
        free = max(self._columns_until(int(last[0])), columns.start)
        if free >= columns.stop:
            return
        where = torch.arange(free, columns.stop) if self.keys is None else self.keys[free : columns.stop]
        # Compared as float32 (exact up to 16 million positions): integers would take six times as long.
        later = torch.gt(where.float(), last[:, None].float(), out=scores.new_empty(len(last), len(where)))
        scores[..., free - columns.start :].sub_(later, alpha=HIDDEN)


@dataclass(frozen=True)
class Selection:
    """The counted queries and the seen keys of a row of the batch under one head of the mask; None: all."""

    rows: Int[Tensor, "row"] | None
    keys: Int[Tensor, "column"] | None
    hidden: UInt8[Tensor, "batch head row column"] | None

    @classmethod
    def of(cls, visible: Bool[Tensor, "#query #key"] | None, rows: Tensor | None, keys: int) -> "Selection":
        """What `visible` leaves of `keys` keys for the queries `rows`; a padding mask leaves nothing to hide."""
        if visible is None:
            return cls(rows, None, None)
        visible = visible.expand(-1, keys)
        if visible.shape[0] > 1 and rows is not None:
            visible = visible[rows]
        alike = visible.stride(0) == 0 or torch.equal(visible, visible[:1].expand_as(visible))  # a padding mask
        seen = visible[:1].any(0) if alike else visible.any(0)
        columns = None if bool(seen.all()) else seen.nonzero().squeeze(-1)
        if alike:
            return cls(rows, columns, None)
        hidden = ~(visible if columns is None else visible[:, columns])
        return cls(rows, columns, hidden.view(torch.uint8)[None, None])

    def shares(self, weights: Float[Tensor, "batch klass query"]) -> Float[Tensor, "batch klass row"]:
        """The weights of the selected queries."""
        return _take(weights, self.rows)

    def store(self, sums: Float[Tensor, "klass group column"], own: Float[Tensor, "batch klass head key"]) -> None:
        """Write the sums of the seen keys of a group of heads, row by row of the batch, into what is theirs."""
        own[..., slice(None) if self.keys is None else self.keys] = rearrange(
            sums, "c (b h) k -> b c h k", b=len(own)
        )

    def heads(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
        chosen: slice,
        scale: float,
        causal: bool,
        room: Room,
        folded: bool,
    ) -> HeadGroup:
        """The selected queries and keys of some query heads of rows [row, head, position, d_head]."""
        last = None
        if causal:
            last = torch.arange(q.shape[2]) if self.rows is None else self.rows
            last = last + (k.shape[2] - q.shape[2])
        groups = q.shape[1] // k.shape[1]
        first, end = chosen.start // groups, (chosen.stop - 1) // groups + 1
        q = _take(q[:, chosen.start : chosen.stop], self.rows).float()
        k = _take(k[:, first:end], self.keys).float()
        if groups > 1 and q.shape[1] > 1:
            k = k[:, [head // groups - first for head in range(chosen.start, chosen.stop)]]
        known = None if lse is None else _take(lse[:, chosen.start : chosen.stop], self.rows).float()
        normalised = known is not None
        if not folded:
            # A query without a key may have -inf.
            offset = None if known is None else (known / scale).nan_to_num_(neginf=HIDDEN).flatten(0, 1)
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            if len(q) == 1 and _onednn_linear() is not None:  # `score_tile`; several heads are one batched product
                q, k = q.contiguous(), k.contiguous()
            factor = scale * LOG2E
            return HeadGroup(q, k, self.keys, self.hidden, last, normalised, room, False, factor, offset)
        q = q * (scale * LOG2E)
        if known is not None:  # finite, since 0 * inf is not a number: a query without a key may have -inf
            column = (known * -LOG2E).nan_to_num_(posinf=-HIDDEN).unsqueeze(-1)
            q, k = torch.cat([q, column], -1), torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1)
        q, k = (x.contiguous().flatten(0, 1) for x in (q, k))
        return HeadGroup(q, k, self.keys, self.hidden, last, normalised, room)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[:, :, index]


def head_groups(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Tensor | None,
    rows: list[Tensor | None],
    causal: bool,
    lse: Tensor | None = None,
    folded: bool = True,
) -> Iterator[tuple[slice, slice, Selection, HeadGroup]]:
    """The query heads of the batch, as many at a time as fit a tile: rows, heads of each, selection, group.

    Of short heads some of one row, or all of some rows, with every query and key: what is hidden or does not count
    is computed too, which takes less time than a call for each row. Of long heads one at a time, with the counted
    queries and the seen keys; of short ones too where a value is not finite, since 0 * inf would spoil the sums of
    what counts. A row's statistics do not depend on its batch but for the last bits.
    """
    heads, room = q.shape[1], Room()
    entries = q.shape[2] * k.shape[2]
    if visible is not None:
        visible = visible.expand(len(q), -1, -1, k.shape[2])
    discards = visible is not None or any(each is not None for each in rows)
    if entries <= SHORT_HEAD and (not discards or bool((q.sum() + k.sum()).isfinite())):
        every = Selection(None, None, None)
        size = max(1, min(TILE_ELEMENTS, SHARED_TILE_ELEMENTS) // max(1, entries))
        hides = visible is not None and not bool(visible.all())
        for some in _parts(len(q), size // heads):
            for chosen in _parts(heads, size):
                source = every.heads(
                    q[some], k[some], None if lse is None else lse[some], chosen, scale, causal, room, folded
                )
                if hides and visible is not None:
                    own = visible[some] if visible.shape[1] == 1 else visible[some, chosen]
                    source = replace(source, hidden=(~own).view(torch.uint8))
                yield some, chosen, every, source
        return
    for row in range(len(q)):
        some = slice(row, row + 1)
        known = None if lse is None else lse[some]
        for head in range(heads):
            masks = None if visible is None else visible[row]
            if head == 0 or (masks is not None and len(masks) > 1):
                mask = None if masks is None else masks[head if len(masks) > 1 else 0]
                selection = Selection.of(mask, rows[row], k.shape[2])
            chosen = slice(head, head + 1)
            source = selection.heads(q[some], k[some], known, chosen, scale, causal, room, folded)
            yield some, chosen, selection, source


def _parts(count: int, size: int) -> list[slice]:
    """Slices of `size`, at least 1, that cover `count` things."""
    size = max(1, size)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def tiled_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
    visible: Bool[Tensor, "#batch #head #query #key"] | None,
    causal: bool,
) -> Float[Tensor, "batch head query"]:
    """`attention_lse` in tiles of torch, on any device."""
    if q.device.type != "cpu" or needs_grad(q, k):
        tiles = _batched_scores(q, k, scale, visible, causal)
        return torch.cat([scores.logsumexp(-1) for _, scores in tiles], -1)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for some, heads, _, source in head_groups(q, k, scale, visible, [None] * q.shape[0], causal):
        for tile, _, scores in source.tiles():
            top, total = exponentials_(scores)
            value = (top[..., 0] + total.log2()) / LOG2E
            value.masked_fill_(value == torch.inf, -torch.inf)
            own = lse[some, heads, tile]
            own.copy_(value.view(own.shape))
    return lse


def _batched_scores(
    q: Tensor, k: Tensor, scale: float, visible: Tensor | None, causal: bool
) -> Iterator[tuple[slice, Float[Tensor, "batch head tile key"]]]:
    """Scores over all rows and heads at once, hidden ones -inf, with a gradient."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = k.float().unsqueeze(2).mT
    for rows in _parts(queries, BATCHED_ELEMENTS // max(1, q.shape[0] * q.shape[1] * keys)):
        tile = rearrange(q[:, :, rows].float() * scale, "b (g n) q d -> b g n q d", g=k.shape[1])
        with without_autocast(q.device):
            scores = rearrange(tile @ grouped, "b g n q k -> b (g n) q k")
        if visible is not None:
            scores = scores.masked_fill(~(visible if visible.shape[2] == 1 else visible[:, :, rows]), -torch.inf)
        if causal:
            last = torch.arange(rows.start, rows.stop, device=q.device) + (keys - queries)
            scores = scores.masked_fill(torch.arange(keys, device=q.device) > last[:, None], -torch.inf)
        yield rows, scores


def batched_received_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    visible: Tensor | None,
    weights: Tensor,
    causal: bool,
    lse: Tensor | None = None,
) -> Float[Tensor, "batch klass head key"]:
    """`received_sums` in tiles over all rows and heads; with a gradient where `lse` is left out."""
    received = q.new_zeros(q.shape[0], q.shape[1], weights.shape[1], k.shape[2], dtype=torch.float32)
    for rows, scores in _batched_scores(q, k, scale, visible, causal):
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        pattern = scores.softmax(-1) if lse is None else (scores - lse[:, :, rows, None]).exp()
        pattern = pattern.masked_fill(empty, 0.0)
        with without_autocast(q.device):
            received = received + weights[:, None, :, rows] @ pattern
    return received.transpose(1, 2)


TILE_ENTRIES = 2**20
"""Entries of a tile of the pattern on a CPU, 4 MiB in float32. A GPU takes more: its time goes into launches."""


def pattern_tiles(
    inputs: AttentionInputs, tile: int | None = None
) -> Iterator[tuple[slice, Float[Tensor, "batch head tile key"]]]:
    """Yield the pattern `tile` queries at a time, in float32; a query without a visible key has zeros.

    A tile has as many queries as fit a number of entries, so that memory does not grow with the length. What is
    dropped after the softmax is zero too. Each tile is a new tensor, which a reducer may keep or edit.
    """
    batch, heads, queries, _ = inputs.q.shape
    cpu = inputs.q.device.type == "cpu"
    entries = (TILE_ENTRIES if cpu else BATCHED_ELEMENTS) // (batch * heads * inputs.k.shape[2])
    tile = tile or max(1, min(queries, entries))
    short = queries * inputs.k.shape[2] <= SHORT_HEAD
    differentiable = (inputs.q, inputs.k) if inputs.spare is None else (inputs.q, inputs.k, inputs.spare)
    by_head = cpu and not needs_grad(*differentiable) and not short
    keys = inputs.k.float().contiguous()
    for rows in _parts(queries, tile):
        if inputs.pattern is not None:
            yield rows, inputs.pattern[:, :, rows].float().clone()
            continue
        pattern = _tile_by_head(inputs, keys, rows) if by_head else _tile_at_once(inputs, keys, rows)
        if inputs.dropped is not None:
            seen = inputs.seen(rows)
            seen = torch.ones_like(pattern, dtype=torch.bool) if seen is None else seen.expand_as(pattern)
            pattern = pattern.masked_fill(inputs.dropped.entries(seen, inputs.own[rows]), 0.0)
        yield rows, pattern


def pattern_rows(inputs: AttentionInputs, rows: slice | Int[Tensor, "row"]) -> Float[Tensor, "batch head row key"]:
    """The pattern of some queries in float32, before anything is dropped."""
    return _tile_at_once(inputs, inputs.k.float(), rows)


def _tile_at_once(
    inputs: AttentionInputs, keys: Tensor, rows: slice | Tensor
) -> Float[Tensor, "batch head tile key"]:
    """One batched product: for GPUs and short heads, and differentiable."""
    q = rearrange(inputs.q[:, :, rows].float() * inputs.scale, "b (g n) q d -> b g n q d", g=keys.shape[1])
    with without_autocast(q.device):
        scores = rearrange(q @ keys.unsqueeze(2).mT, "b g n q k -> b (g n) q k")
    visible = inputs.seen(rows)
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    pattern = softmax(scores, inputs.spare)
    return pattern if visible is None else pattern * visible


def _tile_by_head(inputs: AttentionInputs, keys: Tensor, rows: slice) -> Float[Tensor, "batch head tile key"]:
    """Head by head in the CPU's cache, half the time of the batched product (`benchmarks/received.py`)."""
    q = (inputs.q[:, :, rows].float() * (inputs.scale * LOG2E)).contiguous()
    visible = inputs.seen(rows)
    hidden = None if visible is None else (~visible).view(torch.uint8)
    pattern = q.new_empty(*q.shape[:3], keys.shape[2])
    spare = None if inputs.spare is None else inputs.spare.float() * LOG2E
    groups = q.shape[1] // keys.shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = score_tile(q[row, head], keys[row, head // groups], pattern[row, head])
            if hidden is not None:
                hide_(scores, hidden[row % len(hidden), head % hidden.shape[1]].expand_as(scores))
            top, total = exponentials_(scores)
            if spare is not None:
                total = total + (spare[head] - top[..., 0]).exp2()
            torch.div(scores, total[:, None], out=pattern[row, head])
    return pattern
