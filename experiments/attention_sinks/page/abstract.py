"""The abstract of docs/results.md: a real AR model, a converted one, and models trained from nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_lens.experiments.attention_sinks import (
    conversion_tables,
    fig4_moving,
    fig8_static,
    fig10_eps,
    masking_findings,
)
from dlm_lens.experiments.attention_sinks.masking_conditions import VARIANTS
from dlm_lens.experiments.attention_sinks.recorded_runs import average
from dlm_lens.experiments.attention_sinks.twin_networks import twin_steps
from dlm_lens.experiments.attention_sinks.two_scales import orders_of
from dlm_lens.experiments.experiment import find_experiment
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.one_token import figure1
from dlm_lens.experiments.results import PATTERN, Results
from dlm_lens.experiments.runner import load_results, markdown

NORMS = "one-token-figure1"
ONE_TOKEN = Path(__file__).resolve().parents[2] / "one_token" / "results"

SHIPPED = ("smollm2", "toy-ar", "toy")
"""A real AR model; the AR baseline and the DLM that were trained from nothing."""

Held = Mapping[str, Results]

NEEDED = ("fig3-distribution", "fig4-moving", "fig8-static", "table1-masking", "beyond-conversion", NORMS)
"""Experiments without which there is no abstract."""


def abstract(held: Held) -> Iterator[str]:
    """Paragraphs on the three kinds of models with their numbers, and a table; nothing for unfinished results.

    Args:
        held: results of this paper's experiments by name.
    """
    found = dict(held)
    if any((ONE_TOKEN / NORMS).glob(PATTERN)):
        found[NORMS] = load_results(find_experiment(NORMS), ONE_TOKEN / NORMS)
    if all(name in found for name in NEEDED) and "smollm2" in _models(found, "fig4-moving"):
        yield (
            "No checkpoint of the papers was run, and no GPU was at hand. What of the two papers shows in three "
            "kinds of models that run on two cores:"
        )
        yield "\n".join((_real(found), _converted_model(found), _from_nothing(found), _limits(found)))
        yield table(found)


def _limits(held: Held) -> str:
    counts: dict[str, int] = {}
    lengths: set[int] = set()
    for results in (held[name] for name in held if name != NORMS):
        for model in results.models:
            networks = len({record.item.get("network", 0) for record in results.where(model=model)})
            counts[model] = max(networks, counts.get(model, 0))
            if networks > 1:
                lengths.add(twin_steps(results.settings, model))
    several = [model for model, count in counts.items() if count > 1]
    trained = (
        "One network of each kind was trained here: the intervals on this page are over prompts and say nothing"
    )
    if several:
        *others, last = (f"{counts[model]} networks of {model}" for model in several)
        listed = f"{', '.join(others)} and {last}" if others else last
        steps = " or ".join(f"{n:,}" for n in sorted(lengths))
        trained = (
            f"The intervals are over prompts and, where a section's scale says so, over {listed} (the shipped one "
            f"of 10,000 training steps, and twins of other seeds with {steps}); elsewhere, and of every other "
            "kind, there is one network, and the intervals say nothing"
        )
    return (
        "- **What cannot be said without checkpoints of 8B:** whether the papers' numbers hold for LLaDA, Dream "
        "and MMaDA; how far their sinks drift, and in which direction; what hiding them costs; what a learned sink "
        f"token does in a network that needs one. {trained} about other seeds."
    )


def _real(held: Held) -> str:
    moving, few, first = held["fig4-moving"], held["fig3-distribution"], held["fig8-static"]
    top, exponential = (
        average(few, "smollm2", f"relative {name}", bounds=(0, 1)) for name in ("top", "exponential top")
    )
    return (
        "- **(a) A real AR model** (SmolLM2-135M, English prompts) has the sinks that the literature describes: "
        f"{top} of a pattern's attention goes to 4% of the keys ({exponential.value:.2f} for exponential "
        f"scores), {fig4_moving.share(moving, 'smollm2', 'static')} of the patterns are static on column sums (the "
        f"causal mask alone: {fig4_moving.uniform(moving, 'smollm2', 'sums')}), relative to uniform attention "
        f"{fig8_static.at_beginning(first, 'smollm2', 'left to right', 'relative')} of the static sinks are at the "
        f"first positions, and their values are {figure1.ratio(held[NORMS], 'smollm2', 'any')} as long as others."
        + _cost(held)
    )


def _cost(held: Held) -> str:
    """What hiding one column costs the real AR model, by the reading of "top"."""
    results = held["table1-masking"]
    if "smollm2" not in results.models:
        return ""
    readings: dict[str, dict[str, Any]] = {
        "raw column sums, per head": VARIANTS["raw"],
        "raw, per layer": VARIANTS["raw-layer"],
        "relative, per head": {},
    }
    said = [
        f"{masking_findings.change(results, 'smollm2', 1, **reading)} ({name})"
        for name, reading in readings.items()
        if masking_findings.has(results, "smollm2", 1, **reading)
    ]
    return f" Hiding its strongest column changes the exact match by {'; '.join(said)}." if said else ""


def _converted_model(held: Held) -> str:
    results = held["beyond-conversion"]
    steps = conversion_tables.steps(results, "smollm2", "plain")
    count = conversion_tables.tokens(results, "smollm2", "plain", steps[-1])

    def at(variant: str, step: int, name: str) -> Interval:
        return conversion_tables.measured(results, "smollm2", variant, step, name)

    parent = conversion_tables.steps(results, "smollm2", "ar")[0]
    return (
        "- **(b) The same model as a DLM.** Taking the causal mask away, before any training, takes the first "
        f"token's share of the attention from {at('ar', parent, 'first')} to {at('plain', 0, 'first')}, and "
        f"{at('plain', 0, 'moving_columns')} of the patterns move. The training that two cores allow is short "
        f"({count:,} tokens): the values of sinks stay short ({at('plain', steps[-1], 'norm_columns')}) and fewer "
        f"patterns move ({at('plain', steps[-1], 'moving_columns')}), against the directions set beforehand."
    )


def _from_nothing(held: Held) -> str:
    moving, masking = held["fig4-moving"], held["table1-masking"]
    change = masking_findings.change
    by_class, answered = "", masking_findings.unmasked(masking, "toy")
    if answered:
        answered = f" (its networks answer {answered} with nothing hidden)"
    if masking_findings.has(masking, "toy", 1, **VARIANTS["function"]):
        function, content = (change(masking, "toy", 1, **VARIANTS[name]) for name in ("function", "content"))
        by_class = (
            f" Of the strongest columns only those of punctuation, special and mask tokens hidden: {function}; "
            f"only those of digits and words, which the problem needs: {content}."
        )
    return (
        "- **(c) Models trained from nothing** (0.8 million parameters, word problems) have weaker sinks. toy's "
        f"move: {fig4_moving.share(moving, 'toy', 'moving')} of the patterns, "
        f"{fig4_moving.chance(moving, 'toy').value:.2f} if the same sinks came and went at random times. But its "
        "scores are no more concentrated than exponential ones, the values of its sinks are "
        f"{figure1.ratio(held[NORMS], 'toy', 'any')} as long as others, and hiding one per head changes the exact "
        f"match by {change(masking, 'toy', 1)}{answered}.{by_class}"
    )


def table(held: Held) -> str:
    """One row per number, one column per model, with 95% intervals; "-" where it was not measured."""
    starts = [model for model in ("smollm2", "toy-ar") if model in _models(held, "beyond-conversion")]
    head = ["", "the papers", *(NAMES[model] for model in SHIPPED), *(f"{model} as a DLM" for model in starts)]
    rows = [
        [label, paper, *(_cell(held, name, model, of) for model in SHIPPED),
         *(_converted(held, model, converted) for model in starts)]
        for label, paper, name, of, converted in ROWS
    ]  # fmt: skip
    return markdown(head, rows)


NAMES = {
    "smollm2": "smollm2, a real AR model",
    "toy-ar": "toy-ar, AR from nothing",
    "toy": "toy, a DLM from nothing",
}


def _moving(kind: str) -> Callable[[Results, str], Interval]:
    return lambda results, model: fig4_moving.share(results, model, kind)


def _beginning(results: Results, model: str) -> Interval:
    return fig8_static.at_beginning(results, model, orders_of(results, model)[0])


ROWS: Sequence[tuple[str, str, str, Callable[[Results, str], Interval], str]] = (
    ("static patterns, column sums", "AR: static", "fig4-moving", _moving("static"), "static_columns"),
    ("moving patterns, column sums", "AR: none", "fig4-moving", _moving("moving"), "moving_columns"),
    ("static sinks at the first positions, of the static (converted: main sinks on the first token)",
     "AR: the first token", "fig8-static", _beginning, "first_main_columns"),
    ("keys that are no sink, eps = 3 percent", "at least 0.96", "fig10-eps",
     lambda results, model: fig10_eps.removed(results, model, 3.0, "percent"), ""),
    ("value norm of sinks over that of others", "0.31, 0.40 (DLMs)", NORMS,
     lambda results, model: figure1.ratio(results, model, "any"), "norm_columns"),
    ("exact match, one hidden column per head minus unmasked", "GSM8K: DLM -0.01 to -0.03, AR -0.83",
     "table1-masking",
     lambda results, model: masking_findings.change(results, model, 1), ""),
)  # fmt: skip
"""Label, the papers' number, experiment, how it is computed, name of the statistic in `beyond-conversion`."""


def _models(held: Held, name: str) -> Sequence[str]:
    return held[name].models if name in held else ()


def _cell(held: Held, name: str, model: str, of: Callable[[Results, str], Interval]) -> str:
    return str(of(held[name], model)) if model in _models(held, name) else "-"


def _converted(held: Held, start: str, statistic: str) -> str:
    """A statistic of the untrained conversion, and of its last checkpoint."""
    if not statistic:
        return "-"
    results = held["beyond-conversion"]
    steps = conversion_tables.steps(results, start, "plain")
    ends = [conversion_tables.measured(results, start, "plain", step, statistic) for step in (steps[0], steps[-1])]
    count = conversion_tables.tokens(results, start, "plain", steps[-1])
    return f"{ends[0]} untrained; {ends[1]} after {count:,} tokens"
