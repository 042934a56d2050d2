"""Figure 3: distribution of received attention over tokens, beside what it would be without sinks.

A pattern's n keys have scores s_j = r_j / e_j (1: uniform). The nulls are n independent scores, divided by
their mean: all equal to 1; exponential, which is uniform on the simplex; lognormal, a smooth heavy tail, with the
same ratio of median to mean as the pattern. On the raw scale r_j = s_j e_j with the same s_j: so the nulls have
what a causal mask alone gives to early keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import average, per_prompt, record_prompts, rounded
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import all_of, is_above, is_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

TOP = 0.04
"""The largest share of tokens that are sinks at eps = 3, according to the paper."""

DRAWS = 500
SIGMAS = np.arange(0, 4.01, 0.1)
"""Standard deviations of the logarithms of the lognormal scores."""

MARGIN = 0.03
"""Of 20 to 150 scores from a lognormal of any sigma up to 3, the top share exceeds its estimate from the median by
less than this on average (tests/experiments/test_score_nulls.py)."""

EDGES = np.append(np.round(np.arange(0, 1, 0.02), 2), 1.01)
"""Edges of the bins of A-bar_j, the share of a pattern's attention that key j receives."""


@dataclass(frozen=True)
class Concentration:
    """Per pattern: share of the top 4% of the keys, median over mean, and Gini coefficient."""

    top: Array
    median: Array
    gini: Array


def concentration(values: Array) -> Concentration:
    """Of positive numbers per key [..., key], each pattern on its own.

    The Gini coefficient is sum_i (2 i - n - 1) x_(i) / (n sum_i x_i) of the sorted values: 0 for equal ones, near 1
    where one key has everything.
    """
    n = values.shape[-1]
    ordered = np.sort(values, -1)
    total = ordered.sum(-1)
    count = top_count(n)
    weights = 2 * np.arange(1, n + 1) - n - 1
    return Concentration(
        ordered[..., n - count :].sum(-1) / total,
        np.median(ordered, -1) / (total / n),
        (ordered * weights).sum(-1) / (n * total),
    )


def top_count(n: int) -> int:
    """4% of n keys, rounded, at least one."""
    return max(1, round(TOP * n))


@dataclass(frozen=True)
class Null:
    """Expected statistics of one null for n keys."""

    top: float
    median: float
    gini: float


@dataclass(frozen=True)
class Nulls:
    """The nulls of one set of keys.

    Args:
        uniform: every score is 1.
        exponential: scores are exponential.
        conditional: top share and Gini coefficient of lognormal scores, given patterns' ratios of median to mean.
        exponential_counts: exponential scores' mean counts in the bins of EDGES per pattern.
        lognormal_counts: sum over patterns of lognormal scores' mean counts, given their ratios of median to mean.
    """

    uniform: Null
    exponential: Null
    conditional: Callable[[Array], tuple[Array, Array]]
    exponential_counts: Array
    lognormal_counts: Callable[[Array], Array]


@lru_cache(maxsize=512)
def nulls(expected: tuple[float, ...] | int) -> Nulls:
    """The nulls of n keys (relative to uniform), or of keys with these expectations e_j (raw column sums).

    Monte Carlo with a fixed seed, `DRAWS` patterns per sigma. The lognormal top share that belongs to a ratio of
    median to mean is the mean over simulated patterns of all sigmas with about this ratio.
    """
    weights = np.ones(expected) if isinstance(expected, int) else np.asarray(expected)
    n = len(weights)
    generator = np.random.default_rng(0)
    even = concentration(weights)
    drawn = generator.exponential(size=(20 * DRAWS, n))
    found = concentration(drawn * weights)
    exponential = Null(float(found.top.mean()), float(found.median.mean()), float(found.gini.mean()))
    normal = generator.standard_normal((len(SIGMAS), DRAWS, n))
    scores = np.exp(SIGMAS[:, None, None] * normal)
    ratio = concentration(scores).median
    simulated = concentration(scores * weights)
    counts = np.stack([_binned(one * weights) for one in scores])
    edges, tops, ginis = _running_means(np.log(ratio).ravel(), simulated.top.ravel(), simulated.gini.ravel())
    centres = np.log(ratio).mean(1)[::-1]

    def conditional(median: Array) -> tuple[Array, Array]:
        place = np.log(np.clip(median, 1e-9, None))
        return np.interp(place, edges, tops), np.interp(place, edges, ginis)

    def lognormal_counts(median: Array) -> Array:
        place = np.log(np.clip(median, 1e-9, None))
        sigma = len(SIGMAS) - 1 - np.searchsorted((centres[1:] + centres[:-1]) / 2, place)
        total: Array = counts[sigma].sum(0)
        return total

    return Nulls(
        Null(float(even.top), float(even.median), float(even.gini)),
        exponential,
        conditional,
        _binned(drawn * weights),
        lognormal_counts,
    )


def _binned(values: Array) -> Array:
    """Mean counts per pattern of the shares in the bins of EDGES."""
    shares = values / values.sum(-1, keepdims=True)
    return np.histogram(shares, EDGES)[0] / len(values)


def _running_means(place: Array, *values: Array) -> tuple[Array, ...]:
    """Means of the values in 60 groups of equal size along `place`, whose means come first."""
    order = np.array_split(np.argsort(place, kind="stable"), 60)
    return tuple(np.array([one[part].mean() for part in order]) for one in (place, *values))


PARTS = ("first third", "second third", "last third")
SCALES = ("relative", "raw")
NOTE = (
    "The statistics are means over single patterns, each a step of a head. The picture is of all patterns at once, "
    "and so has a heavier tail where heads differ; the nulls' curves are mixtures in the same way, the lognormal "
    "with each pattern's own ratio of median to mean."
)

STATISTICS = ("top", "median", "gini", "exponential top", "exponential median", "exponential gini",
              "lognormal top", "lognormal gini", "uniform top")  # fmt: skip


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: means over patterns on both scales, of the model and of the nulls; counts of A-bar per third."""
    found: dict[str, list[Any]] = {"counts": [], "exponential_counts": [], "lognormal_counts": []}
    found |= {f"{scale} {name}": [] for scale in SCALES for name in STATISTICS}
    for prompt_run in record_prompts(item, settings, bench):
        for name, value in describe(prompt_run.received["all"]).items():
            found[name].append(value)
    return found


def describe(received: Any) -> dict[str, Any]:
    """The statistics of one prompt's patterns, each judged beside nulls of as many keys.

    None where no pattern has two keys with received attention, as in an AR run that is too short for it.
    """
    values = received.values[:, 0].double().numpy()
    expected = np.broadcast_to(received.expected[:, 0].double().numpy(), values.shape)
    steps, layers, heads, _ = values.shape
    sums = {f"{scale} {name}": 0.0 for scale in SCALES for name in STATISTICS}
    counts, patterns = np.zeros((len(PARTS), len(EDGES) - 1)), 0
    without = {name: np.zeros(len(EDGES) - 1) for name in ("exponential_counts", "lognormal_counts")}
    for step in range(steps):
        for layer in range(layers):
            known = ~np.isnan(values[step, layer, 0])
            if known.sum() < 2:
                continue
            scores, even = values[step, layer][:, known], expected[step, layer, 0, known]
            raw = scores * even
            flat = bool(np.ptp(even) <= 1e-4 * even.max())
            relative = concentration(scores)
            for scale, given, keys in (
                ("relative", relative, len(even)),
                ("raw", relative if flat else concentration(raw), len(even) if flat else _key(even)),
            ):
                null = nulls(keys)
                top, gini = null.conditional(relative.median)
                cells: dict[str, Any] = {
                    "top": given.top, "median": given.median, "gini": given.gini,
                    "exponential top": null.exponential.top, "exponential median": null.exponential.median,
                    "exponential gini": null.exponential.gini, "lognormal top": top, "lognormal gini": gini,
                    "uniform top": null.uniform.top,
                }  # fmt: skip
                for name, value in cells.items():
                    sums[f"{scale} {name}"] += float(np.broadcast_to(value, heads).sum())
            patterns += heads
            counts[step * len(PARTS) // steps] += np.histogram(raw / raw.sum(-1, keepdims=True), EDGES)[0]
            without["exponential_counts"] += heads * null.exponential_counts
            without["lognormal_counts"] += null.lognormal_counts(relative.median)
    return {
        **{name: rounded(value / patterns) if patterns else None for name, value in sums.items()},
        "counts": counts.astype(int).tolist(),
        **{name: rounded(value.tolist(), 2) for name, value in without.items()},
    }


def _key(even: Any) -> tuple[float, ...]:
    """Expectations as a key that equal canvases share."""
    return tuple(float(f"{value:.6g}") for value in even)


def render(results: Results) -> Rendering:
    """The histogram with the nulls' curves, and the statistics beside theirs."""
    rows = []
    for model in results.models:
        for scale in scales_of(results, model):
            cells = {name: average(results, model, f"{scale} {name}", bounds=(0, 1)) for name in STATISTICS}
            rows.append([
                model, named(scale, results, model), str(cells["top"]),
                *(f"{cells[name].value:.2f}" for name in ("uniform top", "exponential top", "lognormal top")),
                str(cells["median"]), f"{cells['exponential median'].value:.2f}",
                str(cells["gini"]), f"{cells['exponential gini'].value:.2f}",
                f"{cells['lognormal gini'].value:.2f}",
                str(cells["top"].n),
            ])  # fmt: skip
    head = [
        "model", "scale", f"attention of the top {TOP:.0%} of the keys", "uniform", "exponential", "lognormal",
        "median score (1: uniform)", "exponential", "Gini coefficient", "exponential", "lognormal", "n",
    ]  # fmt: skip
    table = Table(
        "means over every head and step, beside the same for uniform attention, for exponential scores and for "
        "lognormal scores with the same median and mean, of as many keys; 95% intervals",
        head, rows,
    )  # fmt: skip
    return Rendering([table], {"distribution": histogram(results)}, list(findings(results)), [NOTE])


def scales_of(results: Results, model: str) -> tuple[str, ...]:
    """Both scales for AR models; in a DLM every key has the same e_j, and they give the same numbers."""
    return SCALES if results.is_causal(model) else SCALES[:1]


def named(scale: str, results: Results, model: str) -> str:
    """The scale in words."""
    if not results.is_causal(model):
        return "both (equal)"
    return "relative to uniform" if scale == "relative" else "column sums"


def excess(results: Results, model: str, scale: str, name: str) -> Interval:
    """A statistic minus its null, as "top - lognormal top", paired by prompt."""

    def terms(value: float | None, null: float | None) -> tuple[float, float]:
        return (0.0, 0.0) if value is None or null is None else (value - null, 1.0)

    one, other = name.split(" - ")
    return per_prompt(results, model, [f"{scale} {one}", f"{scale} {other}"], terms, bounds=(-1, 1))


def histogram(results: Results) -> "Figure":
    """Per model, the share of keys over A-bar with a logarithmic axis: thirds of the run, and both nulls.

    Raises:
        ValueError: no model has a pattern with two keys that have received attention.
    """
    from matplotlib.figure import Figure

    from dlm_lens.experiments.attention_sinks.charts import COLOURS, STYLES

    models = [model for model in results.models if np.sum(results.listed("counts", model=model))]
    if not models:
        raise ValueError(
            "no pattern of these runs has two keys that enough queries see; decode longer answers, as with the "
            "setting sampler={'gen_length': 32}"
        )
    columns = min(2, len(models))
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(4.0 * columns, 3.0 * rows + 0.5), layout="constrained")
    edges = np.minimum(EDGES, 1.0)
    most = max(edges[1:][np.sum(results.listed("counts", model=model), (0, 1)) > 0].max() for model in models)
    for number, model in enumerate(models, 1):
        axes = figure.add_subplot(rows, columns, number)
        counts = np.sum(results.listed("counts", model=model), 0)
        curves = {f"{part} of the steps": counts[place] for place, part in enumerate(PARTS)}
        keys = counts.sum()
        for name in ("exponential", "lognormal"):
            curves[f"{name} scores (null)"] = np.sum(results.listed(f"{name}_counts", model=model), 0)
        for place, (name, values) in enumerate(curves.items()):
            null = "null" in name
            axes.stairs(
                np.where(values > 0, values, np.nan) / values.sum(), edges, label=name if number == 1 else None,
                color="black" if null else COLOURS[place], linestyle=STYLES[1 + place % 2] if null else "-",
                linewidth=1.1,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(0.3 / max(1, keys), 1.5)
        axes.set_xlim(0, min(1.0, most + 0.1))
        axes.set_title(model, loc="left", fontsize=8, parse_math=False)
        axes.set_xlabel("share of a pattern's attention that a key receives", fontsize=7)
        axes.set_ylabel("share of the keys", fontsize=7)
        axes.tick_params(labelsize=6)
    figure.legend(loc="outside lower left", ncols=3, fontsize=7, frameon=False)
    return figure


def findings(results: Results) -> Iterator[Finding]:
    """Whether few tokens receive much, the majority little, and more than a smooth heavy tail would give."""
    for model in results.models:
        for scale in scales_of(results, model):
            where = f"{model}, {named(scale, results, model)}" if results.is_causal(model) else model
            top, median = (average(results, model, f"{scale} {name}", bounds=(0, 1)) for name in ("top", "median"))
            exponential, centre, lognormal, flat = (
                average(results, model, f"{scale} {name}", bounds=(0, 1)).value
                for name in ("exponential top", "exponential median", "lognormal top", "uniform top")
            )
            judged = all_of(
                is_above(excess(results, model, scale, "top - exponential top"), 0),
                is_below(excess(results, model, scale, "median - exponential median"), 0),
            )
            yield Finding.of(
                "only a few tokens receive a very high score, the majority close to zero",
                f"{where}: the top {TOP:.0%} receive {top}; the median key {median}",
                judged,
                why="agreement: more in the top and a lower median than for exponential scores of as many keys",
                null=f"exponential scores: {exponential:.2f} and {centre:.2f}; uniform attention: {flat:.2f}",
            )
            more = excess(results, model, scale, "top - lognormal top")
            yield Finding.of(
                "these few are sinks: a group that the other scores do not lead up to",
                f"{where}: the top {TOP:.0%} receive {top}, {more} more than in a lognormal",
                is_above(more, MARGIN),
                why="agreement: more in the top than for lognormal scores with the same median and mean, by the "
                f"{MARGIN} that this estimate may err by",
                null=f"lognormal scores: {lognormal:.2f}",
            )


EXPERIMENT = recorded_runs.experiment(
    name="fig3-distribution",
    shows="2510.15731, Figure 3",
    title="distribution of attention scores over tokens and steps",
    metric="share of attention that the top 4% of the keys of a pattern receive; median score; Gini coefficient",
    small={"models": ["toy", "toy-ar"]},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
