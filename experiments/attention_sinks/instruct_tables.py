"""Tables and findings of beyond-instruct: both models' numbers, and their differences paired by prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.instruct_sinks import BOUNDS, MEASURES, OVERLAPS, ratio
from dlm_lens.experiments.attention_sinks.masking_conditions import BASE, VARIANTS, condition_cells, conditions
from dlm_lens.experiments.attention_sinks.prompt_scores import Prompt, change_by_prompt, correct_by_prompt
from dlm_lens.experiments.attention_sinks.prompt_scores import difference as answers_apart
from dlm_lens.experiments.attention_sinks.table1 import HEAD, rows_of
from dlm_lens.experiments.attention_sinks.twin_networks import base_and_tuning
from dlm_lens.experiments.experiment import Finding, Rendering, Table
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, paired_difference
from dlm_lens.experiments.results import Results

Pair = tuple[str, str]

TWINS = (
    "**What the twin is.** {names}: no instruct model, but `{base}` after {steps} more optimiser steps on the text "
    "that it was trained on (batch {batch}, Muon, rate {rate:g}, one seed). `+sft` is supervised fine-tuning, the "
    "prompt kept and the answer masked; {base} had seen 70% of its rows so already and answers these prompts, so "
    "that the twin learns no new behaviour. `+pretraining` is the control: as many steps of the old objective. The "
    "tables show what this much training does to the sinks of one small model, not what instruction tuning does."
)


def render(results: Results) -> Rendering:
    """Sinks of both models, token classes, overlap, and exact match under masks."""
    found = pairs_of(results)
    masked = conditions({**results.settings, "variants": ["mass"], "varied": []})
    rows = [row for model in results.models for row in rows_of(results, model, masked)]
    task = results.settings["masked_task"]
    tables = [
        Table("sinks of each model's own run; means of the prompts' values, 95% intervals over prompts",
              ["pair", "", "base", "tuned", "tuned - base", "n prompts"],
              [row for pair in found for row in _measures(results, pair)]),
        Table("kinds of tokens that the sinks stand on, each model's own run",
              ["pair", "token", "base: of the sinks", "tuned: of the sinks", "tuned - base",
               "of the base model's keys"], [row for pair in found for row in _kinds(results, pair)]),
        Table("do both have their sinks at the same places? (step, layer, head, position)",
              ["pair", "compared", "Jaccard", "equal sets, where both have a sink", "n prompts"],
              [row for pair in found for row in _overlaps(results, pair)]),
        Table(f"exact match of {task} under masks, as in table1-masking", HEAD, rows),
        Table("what a mask changes in the tuned model, minus what it changes in the base, paired by prompt",
              ["pair", "columns", "reading", "tuned - base"],
              [[_name(pair), *condition_cells(condition), str(apart(results, pair, condition))]
               for pair in found for condition in masked if condition["columns"]]),
    ]  # fmt: skip
    return Rendering(tables, {}, list(_findings(results, found)), list(_notes(results)))


def pairs_of(results: Results) -> list[Pair]:
    """The pairs whose sinks were compared."""
    found = [(record.item["base"], record.item["instruct"]) for record in results.where(measure="sinks")]
    return list(dict.fromkeys(found))


def measured(results: Results, pair: Pair, which: str) -> list[Any]:
    """The counts of every prompt; which is "base", "instruct" or "overlap"."""
    return results.listed(which, base=pair[0], instruct=pair[1])


def values(results: Results, pair: Pair, which: str, measure: str) -> list[float | None]:
    """A measure of every prompt."""
    return [ratio(row, measure) for row in measured(results, pair, which)]


def difference(
    one: Sequence[float | None], other: Sequence[float | None], *, bounds: tuple[float, float] | None = (-1, 1)
) -> Interval:
    """Mean of one - other over the prompts that have both; of shares, without other `bounds`."""
    known = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return paired_difference([a for a, _ in known], [b for _, b in known], bounds=bounds)


def jaccard(results: Results, pair: Pair, name: str) -> Interval:
    """Sinks that both models have over those that either has, a mean over prompts."""
    rows = [row[name] for row in measured(results, pair, "overlap")]
    return mean_over_prompts([both / either if either else None for both, either, *_ in rows], bounds=(0, 1))


def change(results: Results, model: str, condition: Any) -> dict[Prompt, float]:
    """The change of each prompt's exact match under a mask: -1, 0 or 1."""
    return change_by_prompt(
        correct_by_prompt(results, model=model, **condition),
        correct_by_prompt(results, model=model, columns=0, **BASE),
    )


def apart(results: Results, pair: Pair, condition: Any) -> Interval:
    """The instruct model's change under a mask minus the base model's, paired by prompt."""
    base, instruct = (change(results, model, condition) for model in pair)
    return answers_apart(instruct, base)


def _measures(results: Results, pair: Pair) -> Iterator[list[str]]:
    for measure in MEASURES:
        base, instruct = (values(results, pair, which, measure) for which in ("base", "instruct"))
        more = difference(instruct, base, bounds=None if measure in BOUNDS else (-1, 1))
        means = (mean_over_prompts(one, bounds=BOUNDS.get(measure, (0, 1))) for one in (base, instruct))
        yield [_name(pair), measure, *map(_cell, means), _cell(more), str(more.n)]


def shares(results: Results, pair: Pair, which: str, kind: str, of: int = 0) -> list[float | None]:
    """Per prompt, the share of the sinks (or, with of=1, of the keys) that are tokens of this class."""
    found: list[float | None] = [row["kinds"].get(kind, [0.0, 0.0])[of] for row in measured(results, pair, which)]
    return found


def _kinds(results: Results, pair: Pair) -> Iterator[list[str]]:
    rows = [*measured(results, pair, "base"), *measured(results, pair, "instruct")]
    for kind in dict.fromkeys(kind for row in rows for kind in row["kinds"]):
        base, instruct = (shares(results, pair, which, kind) for which in ("base", "instruct"))
        keys = mean_over_prompts(shares(results, pair, "base", kind, 1), bounds=(0, 1))
        yield [_name(pair), kind, *(_cell(mean_over_prompts(one, bounds=(0, 1))) for one in (base, instruct)),
               _cell(difference(instruct, base)), f"{keys.value:.3f}"]  # fmt: skip


def _overlaps(results: Results, pair: Pair) -> Iterator[list[str]]:
    for name, said in OVERLAPS.items():
        rows = [row[name] for row in measured(results, pair, "overlap")]
        equal = mean_over_prompts([same / both if both else None for *_, both, same in rows], bounds=(0, 1))
        yield [_name(pair), said, _cell(jaccard(results, pair, name)), _cell(equal), str(len(rows))]


def _findings(results: Results, found: Sequence[Pair]) -> Iterator[Finding]:
    for pair in found:
        both = (values(results, pair, which, "sinks per map") for which in ("instruct", "base"))
        more = difference(*both, bounds=None)
        moves = difference(*(values(results, pair, which, "patterns whose sink moves")
                             for which in ("instruct", "base")))  # fmt: skip
        yield Finding(
            '"our analysis is limited to instruct models" (8)',
            f"{_name(pair)}: tuned - base: {_cell(more)} sinks per map, {_cell(moves)} of the patterns move; "
            f"Jaccard of the positions on the same canvases {_cell(jaccard(results, pair, 'same'))}",
            "no counterpart",
            _direction(more, "sinks per map"),
        )
        condition = {"columns": results.settings["columns"][0], **BASE}
        if results.where(model=pair[0], **condition) and results.where(model=pair[1], **condition):
            weight = apart(results, pair, {**condition, **VARIANTS["mass"]})
            yield Finding(
                '"our analysis is limited to instruct models" (8)',
                f"{_name(pair)}: what {condition['columns']} hidden sink(s) per head change: "
                f"{apart(results, pair, condition)} (tuned - base); random columns of the same mass: {weight}",
                "no counterpart",
                _direction(apart(results, pair, condition), "exact match kept under the mask"),
            )


def _direction(found: Interval, quantity: str) -> str:
    if found.low > 0:
        return f"more {quantity} in the tuned model"
    return f"less {quantity} in the tuned model" if found.high < 0 else "not told apart by these prompts"


def _notes(results: Results) -> Iterator[str]:
    twins = [model for model in results.models if base_and_tuning(model)[1]]
    given = results.settings
    yield (
        "Both models get the same plain text (an instruct model without its chat template), so that their "
        "positions can be compared."
    )
    if twins:
        yield TWINS.format(names=" and ".join(twins), base=base_and_tuning(twins[0])[0], steps=given["sft_steps"],
                           batch=given["sft_batch"], rate=given["sft_rate"])  # fmt: skip


def _name(pair: Pair) -> str:
    return f"{pair[0]}, {pair[1]}"


def _cell(found: Interval) -> str:
    if found.value != found.value:
        return "-"
    if found.low != found.low:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
