"""Exact match per prompt, and differences between conditions paired by network and prompt."""

import math
from collections.abc import Mapping
from operator import le
from typing import Any

from dlm_lens.experiments.intervals import (
    Interval,
    mean_over_prompts,
    over_networks,
    paired_difference,
    ratio_over_prompts,
    wilson,
)
from dlm_lens.experiments.results import Results

Prompt = tuple[Any, int]
"""The first prompt of its item, and its index in the item."""

Answers = Mapping[int, Mapping[Prompt, float]]
"""One number per prompt of every network: exact match, or a change of it."""


def correct_by_prompt(results: Results, **condition: Any) -> dict[Prompt, float]:
    """Per prompt, the share of its draws (one per seed) that are correct, over the records whose items match."""
    found: dict[Prompt, list[float]] = {}
    for record in results.where(**condition):
        for place, right in enumerate(record.value["correct"]):
            found.setdefault((record.item.get("start"), place), []).append(float(right))
    return {prompt: sum(draws) / len(draws) for prompt, draws in found.items()}


def answers(results: Results, **condition: Any) -> dict[int, dict[Prompt, float]]:
    """`correct_by_prompt` of every network; results stored before twins existed are of network 0."""
    records = results.where(**condition)
    return {
        number: correct_by_prompt(
            Results(results.config, [one for one in records if one.item.get("network", 0) == number])
        )
        for number in sorted({record.item.get("network", 0) for record in records})
    }


def exact_match(found: Mapping[Prompt, float]) -> Interval:
    """Mean with Wilson's interval; with a bootstrap over prompts where the draws of a prompt differ."""
    values = list(found.values())
    if not values:  # an unfinished run
        return mean_over_prompts([], bounds=(0.0, 1.0))
    return wilson(values) if {*values} <= {0.0, 1.0} else mean_over_prompts(values, bounds=(0.0, 1.0))


def difference(
    one: Mapping[Prompt, float], other: Mapping[Prompt, float], bounds: tuple[float, float] = (-1.0, 1.0)
) -> Interval:
    """Mean of one - other over the prompts that both have; `bounds` as for `mean_change`."""
    both = [prompt for prompt in one if prompt in other]
    return paired_difference([one[prompt] for prompt in both], [other[prompt] for prompt in both], bounds=bounds)


def change_by_prompt(one: Mapping[Prompt, float], other: Mapping[Prompt, float]) -> dict[Prompt, float]:
    """Differences one - other per prompt; `difference` is their mean."""
    return {prompt: value - other[prompt] for prompt, value in one.items() if prompt in other}


def mean_match(found: Answers) -> Interval:
    """Exact match: of one network as `exact_match`, of several the mean over networks (`over_networks`)."""
    if len(found) < 2:
        return exact_match(next(iter(found.values()), {}))
    prompts = _shared(found)
    ones = [1.0] * len(prompts)
    return over_networks([([one[p] for p in prompts], ones) for one in found.values()], bounds=(0.0, 1.0))


def changes(one: Answers, other: Answers) -> dict[int, dict[Prompt, float]]:
    """One - other per network and prompt; where only one side has twins, the other's network is fixed."""
    one, other = _as_many(one, other)
    return {number: change_by_prompt(one[number], other[number]) for number in one if number in other}


def mean_change(one: Answers, other: Answers, bounds: tuple[float, float] = (-1.0, 1.0)) -> Interval:
    """Mean of one - other, paired by network and prompt, with an interval over networks and prompts.

    With one network it is `difference`.

    Args:
        one: exact match, or its changes.
        other: what is subtracted.
        bounds: the least and the greatest possible mean; -2 and 2 for changes.
    """
    one, other = _as_many(one, other)
    numbers = [number for number in one if number in other]
    if len(numbers) < 2:
        first, second = (next((side[n] for n in numbers), {}) for side in (one, other))
        return difference(first, second, bounds)
    found = changes(one, other)
    prompts = _shared(found)
    ones = [1.0] * len(prompts)
    return over_networks([([found[n][p] for p in prompts], ones) for n in numbers], bounds=bounds)


def mean_ratio(one: Answers, other: Answers) -> Interval:
    """Sum of one over the sum of other, over the prompts that both have; the mean over networks."""
    numbers = [number for number in one if number in other]
    if len(numbers) < 2:
        top, bottom = (next((side[n] for n in numbers), {}) for side in (one, other))
        both = [prompt for prompt in top if prompt in bottom]
        values = [top[prompt] for prompt in both], [bottom[prompt] for prompt in both]
        share = all(map(le, *values))
        return ratio_over_prompts(*values, bounds=(0.0, 1.0 if share else math.inf))
    prompts = _shared({**one, **{-1 - number: values for number, values in other.items()}})
    terms = [([one[n][p] for p in prompts], [other[n][p] for p in prompts]) for n in numbers]
    # A share has an interval where none or all are left too.
    at_bound = not any(any(top) for top, _ in terms) or all(top == bottom for top, bottom in terms)
    return over_networks(terms, bounds=(0.0, 1.0 if at_bound else math.inf))


def _as_many(one: Answers, other: Answers) -> tuple[Answers, Answers]:
    """Both with the networks of the one that has twins."""
    if len(one) == 1 < len(other):
        return dict.fromkeys(other, *one.values()), other
    if len(other) == 1 < len(one):
        return one, dict.fromkeys(one, *other.values())
    return one, other


def _shared(found: Answers) -> list[Prompt]:
    first, *rest = found.values()
    return [prompt for prompt in first if all(prompt in one for one in rest)]
