"""Tables, figure and findings of `beyond-conversion`, from stored sums alone."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_lens.experiments.attention_sinks.conversion_statistics import SCALES, STATISTICS, Statistic, pairs
from dlm_lens.experiments.attention_sinks.conversion_training import AR
from dlm_lens.experiments.experiment import Finding, Rendering, Table
from dlm_lens.experiments.intervals import Interval, over_networks
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.verdicts import is_above, is_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE_NAMES = {"relative": "relative to uniform", "columns": "raw column sums"}

EXPECTED: Mapping[str, str] = {
    "first": "falls", "first_main": "falls", "static": "falls", "moving": "rises", "moved": "rises",
    "norm": "rises", "loss": "falls",
}  # fmt: skip
"""Direction of each change over the training, set before any number was seen: what an AR model has because it sees
no later token (a sink at the first one, with a short value, that stays) goes, and sinks begin to move."""


def render(results: Results) -> Rendering:
    """A table per scale, a figure per start, and the changes."""
    tables = [_table(results, scale) for scale in SCALES]
    figures = {name.replace("/", "-"): over_training(results, name) for name in results.models}
    captions = {name.replace("/", "-"): _caption(results, name) for name in results.models}
    return Rendering(tables, figures, list(_findings(results)), _notes(results), captions)


def _caption(results: Results, model: str) -> str:
    names = variants(results, model)
    begin = (
        "Every point is a checkpoint with its 95% interval over prompts, 0 the untrained conversion; grey lines "
        "are the AR parent. The loss of an AR model and the bound of a DLM are not compared."
    )
    if not names or steps(results, model, names[0])[0] or not results.where(model=model, variant=AR):
        return begin
    before, after = (measured(results, model, *place, "first") for place in ((AR, 0), (names[0], 0)))
    return (
        f"{begin} The first token's share is {before.value:.3f} in the parent and {after.value:.3f} without its "
        "causal mask: what training changes comes after that."
    )


def variants(results: Results, model: str) -> list[str]:
    """The converted variants of a start that have results, in order."""
    found = dict.fromkeys(record.item["variant"] for record in results.where(model=model))
    return [name for name in found if name != AR]


def steps(results: Results, model: str, variant: str) -> list[int]:
    """The measured steps of a variant, ascending."""
    return sorted({record.item["steps"] for record in results.where(model=model, variant=variant)})


def measured(results: Results, model: str, variant: str, step: int, name: str) -> Interval:
    """A statistic of a checkpoint: ratio of sums over prompts, mean over seeds.

    Args:
        results: of the experiment.
        model: the start.
        variant: of the conversion, or "ar".
        step: of the optimiser.
        name: of a stored pair.
    """
    found = _values(results, model, variant, step, name)
    return (
        over_networks(list(found.values()), bounds=(0.0, _most(name)))
        if found
        else Interval(np.nan, np.nan, np.nan, 0)
    )


def change(results: Results, model: str, before: tuple[str, int], after: tuple[str, int], name: str) -> Interval:
    """A statistic of one checkpoint minus that of another, paired by prompt.

    With R = sum_i a_i / sum_i b_i, prompt i contributes R + (a_i - R b_i) / mean(b), whose mean over prompts is R;
    the interval is that of the differences of the contributions (and of seeds, where there are several).

    Args:
        results: of the experiment.
        model: the start.
        before: (variant, step); the AR parent has one seed.
        after: likewise.
        name: of a stored pair.
    """
    one, two = (_values(results, model, *place, name) for place in (before, after))
    shared = [(one.get(seed, one.get(0)), two[seed]) for seed in two if seed in one or before[0] == AR]
    found = [_contributions(*late) - _contributions(*early) for early, late in shared if early is not None]
    known = [part for part in found if np.isfinite(part).all()]
    if not known:
        return Interval(np.nan, np.nan, np.nan, 0)
    bounds = (-_most(name), _most(name))
    return over_networks([(list(part), [1.0] * len(part)) for part in known], bounds=bounds)


def _most(name: str) -> float:
    """The largest possible value of a statistic: all but norms and losses are shares."""
    return np.inf if name.startswith(("norm", "loss")) else 1.0


def _contributions(top: Sequence[float], bottom: Sequence[float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    a, b = np.asarray(top, float), np.asarray(bottom, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = a.sum() / b.sum()
        return ratio + (a - ratio * b) / b.mean()


def _values(
    results: Results, model: str, variant: str, step: int, name: str
) -> dict[int, tuple[list[float], list[float]]]:
    found = results.where(model=model, variant=variant, steps=step)
    return {record.item["seed"]: pairs(record.value, name) for record in found if name in record.value}


def tokens(results: Results, model: str, variant: str, step: int) -> int:
    """Tokens that the training had seen."""
    return int(results.where(model=model, variant=variant, steps=step)[0].value["tokens"])


def _table(results: Results, scale: str) -> Table:
    """All checkpoints on one scale."""
    head = ["start", "variant", "step", "tokens", "first token's share", "if even", "main sink on it", "static",
            "moving", "moved over the run", "value-norm ratio", "loss", "n prompts"]  # fmt: skip
    rows = []
    for model in results.models:
        for variant in [AR, *variants(results, model)]:
            for step in steps(results, model, variant):
                cells = [
                    measured(results, model, variant, step, name)
                    for name in ("first", "uniform", *(one.key(scale) for one in STATISTICS if one.name != "first"))
                ]
                place = ["-", "-"] if variant == AR else [f"{step:,}", f"{tokens(results, model, variant, step):,}"]
                rows.append([model, variant, *place, *map(_cell, cells), str(cells[0].n)])
    return Table(
        f"scale: {SCALE_NAMES[scale]}. Tokens: positions of the rows of the training. Per prompt "
        "the checkpoint's own denoising run (the AR parent: decoding); "
        "static and moving: shares of the patterns; the loss of the AR parent is its own, that of a DLM a bound; "
        "95% intervals over prompts (and seeds)", head, rows,
    )  # fmt: skip


def _cell(found: Interval) -> str:
    bounds = "" if np.isnan([found.value, found.low]).any() else f" [{found.low:.3f}, {found.high:.3f}]"
    return f"{_number(found.value)}{bounds}"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"


def over_training(results: Results, model: str) -> "Figure":
    """One panel per statistic over training tokens; the AR parent is a horizontal line, on both scales."""
    from matplotlib.figure import Figure

    from dlm_lens.experiments.attention_sinks.charts import COLOURS, MARKS

    figure = Figure(figsize=(12.0, 5.6), layout="constrained")
    names = variants(results, model)
    seen = sorted({tokens(results, model, name, step) for name in names for step in steps(results, model, name)})
    least = next((count for count in seen if count), 1)
    for number, statistic in enumerate(STATISTICS, 1):
        axes = figure.add_subplot(2, 4, number)
        for place, variant in enumerate(names):
            points = [
                (
                    tokens(results, model, variant, step),
                    measured(results, model, variant, step, statistic.key("columns")),
                )
                for step in steps(results, model, variant)
            ]
            centre = np.asarray([found.value for _, found in points])
            ends = np.asarray([[found.low, found.high] for _, found in points]).T
            errors = np.clip(np.nan_to_num(np.stack([centre - ends[0], ends[1] - centre])), 0, None)
            axes.errorbar(
                [count for count, _ in points], centre, yerr=errors, label=variant, color=COLOURS[place],
                marker=MARKS[place], markersize=4, linewidth=1, capsize=2,
            )  # fmt: skip
        _parent(axes, results, model, statistic)
        axes.set_xscale("symlog", linthresh=least)
        axes.set_xlim(-0.1 * least, 1.3 * max(seen, default=1))
        axes.set_title(fill(statistic.label, 44), loc="left", fontsize=8, parse_math=False)
        axes.set_xlabel("training tokens", fontsize=7)
        axes.tick_params(labelsize=6)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {str(label): handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles, loc="lower right", bbox_to_anchor=(0.98, 0.12), fontsize=8, frameon=False
    )
    figure.suptitle(
        f"{model}, from AR to masked diffusion; 95% intervals over prompts", fontsize=9, parse_math=False
    )
    return figure


def _parent(axes: Any, results: Results, model: str, statistic: Statistic) -> None:
    """Horizontal lines of the AR parent, with the interval as a band."""
    styles = {"columns": ("-", "AR parent (raw column sums)"), "relative": (":", "AR parent (relative to uniform)")}
    for scale, (style, label) in styles.items():
        found = measured(results, model, AR, 0, statistic.key(scale))
        if np.isnan(found.value) or (not statistic.scaled and scale == "relative"):
            continue
        axes.axhline(found.value, color="#7f7f7f", linestyle=style, linewidth=1.2, label=label)
        if not np.isnan(found.low):
            axes.axhspan(found.low, found.high, color="#7f7f7f", alpha=0.15, linewidth=0)


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        for variant in variants(results, model):
            known = steps(results, model, variant)
            if known[0] == 0 and results.where(model=model, variant=AR):
                yield from _by_the_mask(results, model, variant)
            if len(known) > 1:
                yield from _by_training(results, model, variant, known)


def _by_the_mask(results: Results, model: str, variant: str) -> Iterator[Finding]:
    """The untrained conversion against the AR parent: what the attention mask alone changes."""
    for name in ("first", "static", "moving", "norm"):
        statistic = next(one for one in STATISTICS if one.name == name)
        for scale in SCALES if statistic.scaled else SCALES[1:]:
            found = change(results, model, (AR, 0), (variant, 0), statistic.key(scale))
            before = measured(results, model, AR, 0, statistic.key(scale))
            after = measured(results, model, variant, 0, statistic.key(scale))
            scaled = f", {SCALE_NAMES[scale]}" if statistic.scaled else ""
            yield Finding(
                f"untrained conversion against its AR parent: {statistic.label}",
                f"{model}, {variant}{scaled}: {before.value:.3f} becomes {after.value:.3f}, a change of "
                f"{_cell(found)}: {_direction(found)} (n = {found.n} prompts)",
                "no counterpart",
                "same weights without the causal mask, each model's own run; rises or falls where the whole "
                "interval of the paired change does",
                null="a change of 0",
            )


def _by_training(results: Results, model: str, variant: str, known: Sequence[int]) -> Iterator[Finding]:
    """The last checkpoint against the first."""
    first, last = known[0], known[-1]
    count = tokens(results, model, variant, last)
    for statistic in STATISTICS:
        key = statistic.key("columns")
        found = change(results, model, (variant, first), (variant, last), key)
        before, after = (measured(results, model, variant, step, key) for step in (first, last))
        wanted = EXPECTED[statistic.name]
        judged = (is_below if wanted == "falls" else is_above)(found, 0.0)
        outcome = {"agrees": ", as expected", "disagrees": ", against the expectation"}.get(judged.verdict, "")
        yield Finding(
            f"expected to {wanted.removesuffix('s')} over the training: {statistic.label}",
            f"{model}, {variant}: {_number(before.value)} at step {first}, {_number(after.value)} at step {last:,} "
            f"({count:,} tokens), a change of {_cell(found)}: {_direction(found)}{outcome} "
            f"(n = {found.n} prompts)",
            "no counterpart",
            "the direction was set before the numbers; no paper shows this; raw column sums, paired by prompt",
            null="a change of 0",
        )


def _direction(found: Interval) -> str:
    return "rises" if found.low > 0 else "falls" if found.high < 0 else "undecided"


def _notes(results: Results) -> list[str]:
    found = []
    for model in results.models:
        own = settings_of(results.settings, model)
        text = f"text={own['text']}" if own["text"] else "the synthetic language of the embedded models"
        for variant in variants(results, model):
            last = steps(results, model, variant)[-1]
            found.append(
                f"{model}, {variant}: AdamW, rate {own['rate']:g} after {own['warm_up']} steps of warm-up, "
                f"{own['batch_size']} rows a step, {own['precision']}, on {text}; measured up to step {last:,} "
                f"({tokens(results, model, variant, last):,} tokens), in {own['denoising_steps']} denoising steps "
                f"of {own['gen_length']} tokens."
            )
    return [
        *found,
        "There is one training per variant and seed; with one seed an interval says nothing about other trainings.",
        "In a masked DLM without learned sinks every query sees every key, so that both scales are the same. The "
        "circuits of AR models and of the masked DLMs trained from them were compared before (2601.14758), sinks "
        "and value norms over that training were not, as far as we know.",
    ]
