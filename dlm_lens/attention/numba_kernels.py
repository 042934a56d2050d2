"""The statistics of a tile of scores in one loop over its rows, compiled by numba; imported only where it runs.

Torch makes several passes over a tile (powers of 2, sums of rows, of parts of rows, of columns), which together
take longer than the matrix product that fills it. Here a row is read once, and what is computed from it stays in
the nearest cache, so that `pattern_stats` takes half of the time, product included (`benchmarks/received.py`). The
code is compiled at the first import, in a few seconds, and kept beside this file, or in numba's own cache where
that cannot be written.
"""

import numba
import numpy as np
from jaxtyping import Float, Int
from numpy import float32, int32

# The least exponent of a normal float32: what is smaller counts as 0.
LEAST = float32(-126.0)
# 2^r = sum_n (r ln 2)^n / n!, for r of -0.5 to 0.5: what is left out is below 2^-26.
C1, C2, C3 = float32(0.6931471805599453), float32(0.2402265069591007), float32(0.05550410866482158)
C4, C5, C6 = float32(0.009618129107628477), float32(0.0013333558146428443), float32(0.00015403530393381608)
ONE, HALF, ZERO = float32(1.0), float32(0.5), float32(0.0)

_SIGNATURE = numba.types.void(
    numba.float32[:, :, ::1],
    numba.float32[:, :],
    numba.float32,
    numba.boolean,
    numba.float32,
    numba.int64,
    numba.int64,
    numba.int64,
    numba.int64[:],
    numba.float32[:],
    numba.float32[:, :, :],
    numba.float32[:, :, :],
    numba.float32[:, :, :],
)


# Sums may be taken in another order, so that they are vectorised; values that are not finite stay what they are.
FAST = {"reassoc", "contract", "nsz", "arcp"}


@numba.njit(inline="always", fastmath=FAST)
def _powers(
    line: Float[np.ndarray, "width"], offset: float, factor: float, power: Float[np.ndarray, "width"]
) -> tuple[float32, float32]:
    """Write 2^s of every s = (line - offset) factor to `power`; return sum 2^s, sum 2^s s."""
    total = ZERO
    product = ZERO
    for j in range(len(line)):
        score = (line[j] - offset) * factor
        vanishes = score < LEAST
        score = LEAST if vanishes else score
        whole = np.floor(score + HALF)
        rest = score - whole
        value = ONE + rest * (C1 + rest * (C2 + rest * (C3 + rest * (C4 + rest * (C5 + rest * C6)))))
        bits = int32((int32(whole) + int32(127)) << int32(23))  # of the float32 2^whole
        value = ZERO if vanishes else value * bits.view(float32)
        power[j] = value
        total += value
        product += value * score
    return total, product


@numba.njit(inline="always", fastmath=FAST)
def _sum(values: Float[np.ndarray, "width"], start: int, end: int) -> float32:
    total = ZERO
    for j in range(start, end):
        total += values[j]
    return total


@numba.njit(_SIGNATURE, cache=True, fastmath=FAST, error_model="numpy")
def reduce_tile(
    products: Float[np.ndarray, "head tile width"],
    offsets: Float[np.ndarray, "head row"],
    factor: float,
    normalised: bool,
    hidden: float,
    first_row: int,
    first_column: int,
    canvas: int,
    before: Int[np.ndarray, "row"],
    itself: Float[np.ndarray, "row"],
    weights: Float[np.ndarray, "batch klass row"],
    rows: Float[np.ndarray, "sum head row"],
    columns: Float[np.ndarray, "klass head column"],
) -> None:
    """Add the sums of a tile of scores s = (product - offset) factor to `rows` and `columns`.

    Args:
        products: of queries and keys.
        offsets: the log-sum-exp of each row where `normalised`, else its maximum.
        factor: base-2 units in one of the products.
        normalised: whether 2^s is the pattern; else a tile has whole rows, and it is 2^s over their sum.
        hidden: a row with a maximum below it sees no key.
        first_row: the tile's first row.
        first_column: the tile's first column.
        canvas: number of columns that are canvas positions.
        before: number of columns that are before each row's own position.
        itself: 1 where a row's own position is the next column and seen, else 0.
        weights: of the query classes; the heads are those of the batch row by row.
        rows: the sums of each row, the fields of `RowSums`.
        columns: the sums of each column by class.
    """
    heads, count, width = products.shape
    power = np.empty(width, float32)
    added = np.empty((weights.shape[1], width), float32)
    each = heads // weights.shape[0]
    first_sink = max(0, min(canvas - first_column, width))
    for head in range(heads):
        own = weights[head // each]
        added[:] = ZERO
        for place in range(count):
            row = first_row + place
            line = products[head, place]
            offset = offsets[head, row]
            if offset < hidden:
                rows[0, head, row] = np.inf
                continue
            total, product = _powers(line, offset, factor, power)
            earlier = before[row] - first_column
            end = max(0, min(earlier, width))
            rows[0, head, row] += total
            rows[1, head, row] += product
            rows[2, head, row] += _sum(power, 0, end)
            rows[4, head, row] += _sum(power, first_sink, width)
            if itself[row] != ZERO and earlier == end and end < width:
                rows[3, head, row] += power[end]
            for klass in range(own.shape[0]):
                weight = own[klass, row]
                if weight != ZERO:
                    if not normalised:
                        weight = weight / total
                    for j in range(width):
                        added[klass, j] += weight * power[j]
        for klass in range(own.shape[0]):
            for j in range(width):
                columns[klass, head, first_column + j] += added[klass, j]
