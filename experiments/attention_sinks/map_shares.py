"""Shares of maps (layer, head, step) with a sink, their nulls, and what is said of them beside another model's.

An experiment stores counts per prompt and reading: "maps", "with" (a sink) and "mask alone" (a sink under uniform
attention and the same mask); a reading is a class of queries and a scale.
"""

from collections.abc import Iterator, Mapping, Sequence

from dlm_lens.experiments.attention_sinks.recorded_runs import per_prompt
from dlm_lens.experiments.experiment import Finding
from dlm_lens.experiments.intervals import Interval, unpaired_difference
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.verdicts import is_above, is_within

NO_EXCESS = 0.0
"""Bound of "there are sinks" and of all other statements about an excess: more than the null."""

MARGIN = 0.10
"""Margin of "as many maps with sinks" and of other statements that two shares are alike."""


def share(results: Results, model: str, reading: str) -> Interval:
    """Share of the maps that have a sink."""
    return part(results, model, reading, "with", "maps")


def part(results: Results, model: str, reading: str, top: str, bottom: str) -> Interval:
    """The ratio of two counts."""
    return per_prompt(results, model, [reading], lambda one: (one[top], one[bottom]), bounds=(0, 1))


def beyond(results: Results, model: str, reading: str, top: str, null: str, bottom: str) -> Interval:
    """The ratio of two counts minus that of the null."""
    return per_prompt(results, model, [reading], lambda one: (one[top] - one[null], one[bottom]), bounds=(-1, 1))


def models_with(results: Results, fact: str) -> list[str]:
    """The models of which the results say that a fact holds, such as "block causal"."""
    return [model for model in results.models if any(one.value[fact] for one in results.where(model=model))]


def has_sinks(results: Results, model: str, reading: str, label: str, kind: str, null: str) -> Finding:
    """Whether a kind of model has more maps with a sink than uniform attention gives.

    Args:
        results: the experiment's.
        model: one of that kind.
        reading: the name of its counts.
        label: of the reading.
        kind: of the model, such as "a block-diffusion model".
        null: what uniform attention is called in the line of the null.
    """
    where = (results, model, reading)
    more = "uniform attention" if null == "uniform attention" else "uniform attention under the same mask"
    return Finding.of(
        f"{kind} has attention sinks (no statement of the paper's)",
        f"{model}, {label}: {share(*where)} of the maps have one",
        is_above(beyond(*where, "with", "mask alone", "maps"), NO_EXCESS),
        why=f"agreement: more maps than {more}",
        null=f"{null}: {part(*where, 'mask alone', 'maps')}",
    )


def as_many_as(
    results: Results, model: str, others: Mapping[str, Sequence[str]], labels: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether as many of a model's maps have a sink as of other models'.

    Args:
        results: the experiment's.
        model: the model.
        others: the readings on which each other model is compared.
        labels: of the readings.
    """
    for other, readings in others.items():
        for reading in readings:
            one, two = (share(results, name, reading) for name in (model, other))
            apart = unpaired_difference(one, two)
            yield Finding.of(
                f"as many maps have sinks as in {other} (no statement of the paper's)",
                f"{labels[reading]}: {model} {one}, {other} {two}; difference {apart}",
                is_within(apart, -MARGIN, MARGIN),
                why=f"agreement: the difference is within {MARGIN:.2f}, a margin that was set before",
                null=f"{other}'s mask alone: {part(results, other, reading, 'mask alone', 'maps')}",
            )
