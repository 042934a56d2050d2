"""The metric once more, as plain loops over Python floats, written from the paper and the design alone."""

import math


def row_uniform(visible):
    """A pattern [query][key] that spreads each query evenly over the keys it sees."""
    return [[(1.0 / sum(row) if seen else 0.0) for seen in row] for row in visible]


def column_sums(pattern, queries):
    return [
        math.fsum(row[j] for row, counts in zip(pattern, queries, strict=True) if counts)
        for j in range(len(pattern[0]))
    ]


def scores(pattern, visible, queries, relative=True, min_viewers=1):
    """score_j = r_j / e_j (or r_j); None where fewer than min_viewers counted queries see j."""
    received = column_sums(pattern, queries)
    expected = column_sums(row_uniform(visible), queries)
    found = []
    for j in range(len(received)):
        viewers = sum(1 for row, counts in zip(visible, queries, strict=True) if counts and row[j])
        if viewers < min_viewers:
            found.append(None)
        else:
            found.append(received[j] / expected[j] if relative else received[j])
    return found


def above_mean(values, eps):
    """Eq. 3: value_j > 1 / (n - 1) sum_{k != j} value_k + eps, over the defined values."""
    sinks = []
    for j, value in enumerate(values):
        others = [v for k, v in enumerate(values) if k != j and v is not None]
        sinks.append(value is not None and bool(others) and value > math.fsum(others) / len(others) + eps)
    return sinks


def above_std(values, k):
    defined = [v for v in values if v is not None]
    mean = math.fsum(defined) / len(defined)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in defined) / len(defined))
    return [v is not None and v > mean + k * std for v in values]


def harmonic(n):
    return math.fsum(1.0 / i for i in range(1, n + 1))
