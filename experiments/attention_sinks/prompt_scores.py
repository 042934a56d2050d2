"""Exact match per prompt, and differences between conditions paired by prompt."""

from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.intervals import Interval, mean_over_prompts, paired_difference, wilson
from dlm_lens.experiments.results import Results

Prompt = tuple[Any, int]
"""The first prompt of its item, and its index in the item."""


def correct_by_prompt(results: Results, **condition: Any) -> dict[Prompt, float]:
    """Per prompt, the share of its draws (one per seed) that are correct, over the records whose items match."""
    found: dict[Prompt, list[float]] = {}
    for record in results.where(**condition):
        for place, right in enumerate(record.value["correct"]):
            found.setdefault((record.item.get("start"), place), []).append(float(right))
    return {prompt: sum(draws) / len(draws) for prompt, draws in found.items()}


def exact_match(found: Mapping[Prompt, float]) -> Interval:
    """Mean with Wilson's interval; with a bootstrap over prompts where the draws of a prompt differ."""
    values = list(found.values())
    if not values:  # an unfinished run
        return mean_over_prompts([])
    return wilson(values) if {*values} <= {0.0, 1.0} else mean_over_prompts(values)


def difference(one: Mapping[Prompt, float], other: Mapping[Prompt, float]) -> Interval:
    """Mean of one - other over the prompts that both have."""
    both = [prompt for prompt in one if prompt in other]
    return paired_difference([one[prompt] for prompt in both], [other[prompt] for prompt in both])


def change_by_prompt(one: Mapping[Prompt, float], other: Mapping[Prompt, float]) -> dict[Prompt, float]:
    """Differences one - other per prompt; `difference` is their mean."""
    return {prompt: value - other[prompt] for prompt, value in one.items() if prompt in other}
