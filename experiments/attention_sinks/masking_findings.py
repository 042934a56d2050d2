"""Findings of Table 1: exact match, differences paired by prompt, and verdicts against the paper."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.masking_conditions import BASE, CONTROLS, READINGS
from dlm_lens.experiments.attention_sinks.prompt_scores import (
    change_by_prompt,
    correct_by_prompt,
    difference,
    exact_match,
)
from dlm_lens.experiments.experiment import Finding
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Results


def accuracy(results: Results, model: str, columns: int, **changes: Any) -> Interval:
    """Exact match of a condition: the base reading with some changes."""
    return exact_match(correct_by_prompt(results, model=model, columns=columns, **{**BASE, **changes}))


def change(
    results: Results, model: str, columns: int, against: Mapping[str, Any] | None = None, **changes: Any
) -> Interval:
    """Exact match of a condition minus that of another (the unmasked model's), paired by prompt."""
    one = correct_by_prompt(results, model=model, columns=columns, **{**BASE, **changes})
    other = correct_by_prompt(
        results, model=model, **({"columns": 0, **BASE} if against is None else dict(against))
    )
    return difference(one, other)


def findings(results: Results) -> Iterator[Finding]:
    """The paper's claims about DLMs and the AR baseline, and controls that the paper lacks."""
    ours = [model for model in results.models if has(results, model, 0)]
    for model in ours:
        yield from _of_baseline(results, model) if results.is_causal(model) else _of_diffusion(results, model)
    for model in ours:
        yield from (
            _against(results, model, other, reading)
            for other in ours
            for reading in READINGS
            if results.is_causal(other) and not results.is_causal(model) and has(results, model, 1, **reading)
        )
    yield from _of_controls(results, ours)


def _of_diffusion(results: Results, model: str) -> Iterator[Finding]:
    for reading in (one for one in READINGS if has(results, model, 1, **one)):
        lost = change(results, model, 1, **reading)
        yield Finding(
            'masking one sink costs a DLM "less than 1%" (text); Table 1: 0 to 0.03 on GSM8K',
            f"{model}: {lost} (one sink {_reading(reading)})",
            "agrees" if lost.low > -0.05 else "disagrees" if lost.high < -0.05 else "undecided",
            "agreement is taken as a loss below 0.05",
        )
    if has(results, model, 10):
        lost = change(results, model, 10)
        yield Finding(
            "ten sinks cost 0.07 (Dream) to 0.21 (LLaDA) on GSM8K",
            f"{model}: {lost} (ten sinks per head)",
            "disagrees" if lost.high < -0.25 or lost.low > 0
            else "agrees" if lost.low > -0.25 and lost.high < 0 else "undecided",
            "ten columns are about a fifth of these canvases of 48 to 58 positions, and at most 4% of the paper's, "
            "whose answers alone have 256",
        )  # fmt: skip


def _against(results: Results, model: str, other: str, reading: Mapping[str, Any]) -> Finding:
    ours, theirs = change(results, model, 1, **reading), change(results, other, 1, **reading)
    more = change_beside(results, model, other, **reading)
    return Finding(
        "DLMs lose less than an AR model: 0 to 0.03 against 0.83 on GSM8K",
        f"one sink {_reading(reading)}: {model} {ours}, {other} {theirs}; difference {more}",
        "agrees" if more.low > 0 else "disagrees" if more.high < 0 else "undecided",
        "agreement is taken as a difference above 0, paired by prompt",
    )


def change_beside(results: Results, model: str, other: str, **reading: Any) -> Interval:
    """The change of exact match by one hidden sink in a model, minus that in another, paired by prompt."""
    ours, theirs = (
        change_by_prompt(
            correct_by_prompt(results, model=name, columns=1, **{**BASE, **reading}),
            correct_by_prompt(results, model=name, columns=0, **BASE),
        )
        for name in (model, other)
    )
    return difference(ours, theirs)


def _reading(reading: Mapping[str, Any]) -> str:
    return f"per {reading.get('per', 'head')}"


def _of_baseline(results: Results, model: str) -> Iterator[Finding]:
    for scale in ("raw", "relative"):
        for k in (1, 5):
            if has(results, model, k, scale=scale):
                left, kept = accuracy(results, model, k, scale=scale), part_kept(results, model, k, scale=scale)
                yield Finding(
                    "one masked sink destroys the AR baseline: 0.85 to 0.02",
                    f"{model}: {accuracy(results, model, 0)} to {left} (top {k}, {scale} column sums)",
                    "agrees" if kept.high < 0.5 else "disagrees" if kept.low > 0.5 else "undecided",
                    "agreement is taken as less than half left"
                    + ("; relative sums leave out what the causal mask alone gives to the first token"
                       if scale == "relative" else ""),
                )  # fmt: skip
                break


def part_kept(results: Results, model: str, columns: int, **changes: Any) -> Interval:
    """Exact match of a condition divided by the unmasked model's, over the prompts that have both."""
    hidden = correct_by_prompt(results, model=model, columns=columns, **{**BASE, **changes})
    plain = correct_by_prompt(results, model=model, columns=0, **BASE)
    both = [prompt for prompt in hidden if prompt in plain]
    return ratio_over_prompts([hidden[prompt] for prompt in both], [plain[prompt] for prompt in both])


def _of_controls(results: Results, models: Sequence[str]) -> Iterator[Finding]:
    for model in models:
        for k in results.settings["columns"]:
            for choose, name in CONTROLS.items():
                if has(results, model, k) and has(results, model, k, choose=choose):
                    more = against_control(results, model, k, choose)
                    yield Finding(
                        "no control in the paper",
                        f"{model}: top {k} minus {name}: {more}",
                        "no counterpart",
                        "below 0: sinks matter more than other columns" + _weight(choose)
                        if more.high < 0
                        else "above 0: sinks matter less than other columns" + _weight(choose)
                        if more.low > 0
                        else "",
                    )


def _weight(choose: str) -> str:
    return " that receive as much" if choose == "mass" else ""


def against_control(results: Results, model: str, columns: int, choose: str) -> Interval:
    """Exact match with the k strongest columns hidden minus that under a control, paired by prompt."""
    return change(results, model, columns, {"columns": columns, **BASE, "choose": choose})


def has(results: Results, model: str, columns: int, **changes: Any) -> bool:
    """Whether the results hold a condition."""
    return bool(results.where(model=model, columns=columns, **{**BASE, **changes}))
