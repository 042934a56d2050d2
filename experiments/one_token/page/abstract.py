"""The abstract of docs/results_one_token.md: a real AR model, and networks that were trained here."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dlm_lens.experiments.one_token import figure1, figure3, noop_bound, tables
from dlm_lens.experiments.one_token.miniature import VARIANTS
from dlm_lens.experiments.one_token.recorded_runs import title
from dlm_lens.experiments.pages.appendix import Entry
from dlm_lens.experiments.results import Results

REAL, PLAIN = "smollm2", "toy"

NEEDED = ("figure1", "figure3", "noop", "table1", "table2", "table3", "table4", "table5")
"""Without one of them there is no abstract."""

CANNOT = (
    "- **What cannot be said without networks of the paper's size:** whether a sink token raises benchmark "
    "accuracies; whether the values of sinks become short in a DLM of 0.5 billion parameters, as in the real AR "
    "model; whether the sinks of such a network stop moving when it has a sink token. Networks of 0.8 million "
    "parameters on a synthetic language can show that a comparison can have a sign, and not that it must."
)


def abstract(found: Sequence[Entry], prefix: str) -> Iterator[str]:
    """What shows in which networks, with numbers, and what cannot be said; nothing for unfinished results.

    Args:
        found: the results of the page.
        prefix: of the experiments' names.
    """
    held = {one.experiment.name.removeprefix(prefix): one for one in found}
    if any(name not in held for name in NEEDED) or REAL not in held["figure1"].results.models:
        return
    results = {name: one.results for name, one in held.items()}
    yield "## Abstract"
    yield "\n".join((_real(results), _mechanism(results), _gain(results), _ablations(held), CANNOT))


def _real(results: Mapping[str, Results]) -> str:
    norms, noop = results["figure1"], results["noop"]
    columns = (
        f" ({figure1.ratio(norms, REAL, figure1.COLUMNS)} for the sinks on column sums)"
        if figure1.has_pairs(norms, REAL, figure1.COLUMNS)
        else ""
    )
    return (
        "- **A real AR model** (SmolLM2-135M, English prompts) has the sinks that the paper describes: their "
        f"values are {figure1.ratio(norms, REAL, 'any')} as long as others{columns}, where the paper prints 0.31 "
        "and 0.40 for two DLMs, and a unit of attention to them adds "
        f"{noop_bound.per_attention(noop, REAL, 'output')} of what it adds at random other keys with as much "
        "attention: attending to a sink does little."
    )


def _mechanism(results: Mapping[str, Results]) -> str:
    norms, noop = results["figure1"], results["noop"]
    learned = "; ".join(
        f"{title(model)} {figure3.inner_ratio(results['figure3'], model)}" for model in results["figure3"].models
    )
    return (
        "- **In the networks that were trained here that mechanism is missing.** The values of toy's sinks are "
        f"{figure1.ratio(norms, PLAIN, 'any')} as long as others, a unit of attention to them adds "
        f"{noop_bound.per_attention(noop, PLAIN, 'output')} of what it adds at random keys, and the value of a "
        f"learned sink token is not short either, in the inner layers ({learned} of the others' norms)."
    )


def _gain(results: Mapping[str, Results]) -> str:
    def of(table: str, one: str, other: str) -> str:
        return tables.said(
            f"{VARIANTS[one].label} - {VARIANTS[other].label}",
            tables.difference(results[table], one, other),
        )

    kinds = {"table1": "Converted from an AR model", "table2": "From scratch"}
    said = (
        f"{kind}: {'; '.join(of(table, one, 'plain') for one in ('sink', 'gated'))}."
        for table, kind in kinds.items()
    )
    return f"- **The gain of a sink token and of a gate**, in validation loss. {' '.join(said)}"


def _ablations(held: Mapping[str, Entry]) -> str:
    verdicts = Counter(
        each.verdict for name in ("table3", "table4", "table5") for each in held[name].rendering.findings
    )
    count = ", ".join(f"{verdicts[name]} {name}" for name in ("agrees", "disagrees", "undecided") if verdicts[name])
    return (
        "- **Ablations** (place, number and value of the sink token, Tables 3 to 5): verdicts "
        f"{count}. Where the sink token's own gain cannot be told from 0, nothing can be said relative to it."
    )
