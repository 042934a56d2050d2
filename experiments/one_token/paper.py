"""The numbers that the paper prints: Tables 1 to 5 and the norms of Figure 1."""

from collections.abc import Mapping

from dlm_lens.experiments.experiment import Table

BENCHMARKS = ("ARC-e", "ARC-c", "HellaSwag", "PIQA", "RACE", "SIQA", "LAMBADA", "GSM8K")
FEWER = ("ARC-e", "ARC-c", "RACE", "HellaSwag", "PIQA")

Rows = Mapping[str, tuple[float, ...]]

TABLE1_SMALL: Rows = {
    "DLM": (44.70, 27.13, 35.21, 55.28, 31.29, 40.28, 44.09, 46.92),
    "DLM + extra token": (55.47, 32.17, 48.91, 63.44, 33.79, 37.82, 45.24, 49.20),
    "DLM + GA": (47.85, 29.27, 41.95, 61.92, 34.07, 36.08, 45.10, 47.01),
}
TABLE1_LARGE: Rows = {
    "DLM": (65.49, 41.47, 59.50, 66.49, 37.80, 36.18, 66.58, 57.77),
    "DLM + extra token": (68.18, 43.43, 61.31, 68.17, 37.61, 39.97, 66.41, 58.45),
    "DLM + GA": (53.03, 32.27, 52.90, 60.33, 37.42, 38.26, 51.10, 52.35),
}
TABLE2: Rows = {
    "DLM": (32.20, 25.09, 31.56, 54.08, 31.77, 35.98, 29.26, 34.95),
    "DLM + extra token": (40.91, 22.35, 40.43, 62.24, 32.73, 37.92, 47.16, 35.17),
    "DLM + GA": (36.28, 23.46, 37.61, 57.07, 33.68, 34.44, 42.27, 36.39),
}
TABLE3: Rows = {"Front": (55.47, 32.17, 33.79, 48.91, 63.44), "End": (56.14, 32.51, 31.77, 48.16, 64.31)}
TABLE4: Rows = {
    "0": (44.70, 27.13, 31.29, 35.21, 55.28),
    "1": (55.47, 32.17, 33.79, 48.91, 63.44),
    "2": (54.76, 32.42, 32.89, 48.94, 63.66),
    "4": (55.39, 31.47, 33.06, 48.45, 62.62),
}
TABLE5: Rows = {
    "Stable sink token": (55.47, 32.17, 33.79, 48.91, 63.44),
    "Zero-value token": (55.68, 32.94, 32.87, 48.81, 64.09),
}
FIGURE1 = {"LLaDA-Instruct": (2.36, 7.60), "Dream-Instruct": (3.15, 7.79)}
"""Mean value norms of 10K sinks and 10K other tokens."""


def printed(title: str, rows: Rows, benchmarks: tuple[str, ...] = BENCHMARKS) -> Table:
    """A table of the paper."""
    lines = [[name, *(f"{value:.2f}" for value in row)] for name, row in rows.items()]
    return Table(title, ["", *benchmarks], lines)


def mean_gain(rows: Rows, one: str, other: str) -> float:
    """Mean difference over the benchmarks, in points."""
    return sum(a - b for a, b in zip(rows[one], rows[other], strict=True)) / len(rows[one])


def lower(rows: Rows, one: str, other: str, benchmarks: tuple[str, ...] = BENCHMARKS) -> list[str]:
    """The benchmarks on which `one` is below `other`, with both numbers."""
    cells = zip(benchmarks, rows[one], rows[other], strict=True)
    return [f"{name} {b:.2f} to {a:.2f}" for name, a, b in cells if a < b]
