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


def lifetimes(scores, eps, factor):
    """Spells (position, first, last) of one pattern [step][key], from Eq. 3 with hysteresis, step by step."""
    found, open_since = [], {}
    for step, values in enumerate(scores):
        for j, value in enumerate(values):
            others = [v for k, v in enumerate(values) if k != j and v is not None]
            excess = None if value is None or not others else value - math.fsum(others) / len(others)
            stays = j in open_since and excess is not None and excess >= factor * eps
            enters = excess is not None and excess > eps
            if j in open_since and not (stays or enters):
                found.append((j, open_since.pop(j), step - 1))
            elif j not in open_since and enters:
                open_since[j] = step
    found += [(j, first, len(scores) - 1) for j, first in open_since.items()]
    return sorted(found)


def moves(spells, steps):
    """Pairs (from, to) of spells: the best fitting pair first, every spell at most once on each side."""
    pairs = []
    for a in spells:
        for b in spells:
            died, born = a[2] < steps - 1, b[1] > 0
            delay = b[1] - (a[2] + 1)
            if died and born and a[0] != b[0] and abs(delay) <= 1 and b[1] > a[1] and b[2] > a[2]:
                pairs.append((abs(delay), abs(a[0] - b[0]), delay, a[0], b[0], a, b))
    taken, used_from, used_to = [], set(), set()
    for *_, a, b in sorted(pairs):
        if a not in used_from and b not in used_to:
            used_from.add(a)
            used_to.add(b)
            taken.append((a, b))
    return sorted(taken)


def slope(points):
    """Of the least-squares line through (x, y)."""
    n = len(points)
    mx, my = math.fsum(x for x, _ in points) / n, math.fsum(y for _, y in points) / n
    return math.fsum((x - mx) * (y - my) for x, y in points) / math.fsum((x - mx) ** 2 for x, _ in points)
