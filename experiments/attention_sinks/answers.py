"""Right and wrong answers prompt by prompt: exact match, and differences between conditions."""

from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.intervals import Interval, mean_over_prompts, paired_difference, wilson
from dlm_lens.experiments.results import Results

Prompt = tuple[Any, int]
"""Where the prompt's item begins, and its place in it."""


def answers(results: Results, **wanted: Any) -> dict[Prompt, float]:
    """By prompt, the part of its draws (one per seed) that are right, of the records whose items are so."""
    found: dict[Prompt, list[float]] = {}
    for record in results.where(**wanted):
        for place, right in enumerate(record.value["correct"]):
            found.setdefault((record.item.get("start"), place), []).append(float(right))
    return {prompt: sum(draws) / len(draws) for prompt, draws in found.items()}


def exact_match(found: Mapping[Prompt, float]) -> Interval:
    """Wilson's interval; a bootstrap over prompts where draws of one prompt differ, which are no cases apart."""
    values = list(found.values())
    if not values:  # of an unfinished run
        return mean_over_prompts([])
    return wilson(values) if {*values} <= {0.0, 1.0} else mean_over_prompts(values)


def difference(one: Mapping[Prompt, float], other: Mapping[Prompt, float]) -> Interval:
    """Mean of one - other over the prompts that both have, of an unfinished run too."""
    both = [prompt for prompt in one if prompt in other]
    return paired_difference([one[prompt] for prompt in both], [other[prompt] for prompt in both])


def minus(one: Mapping[Prompt, float], other: Mapping[Prompt, float]) -> dict[Prompt, float]:
    """Prompt by prompt what `difference` is the mean of."""
    return {prompt: value - other[prompt] for prompt, value in one.items() if prompt in other}
