"""Section 5.1: does a sink stay at its position, or move with its token?"""

from collections.abc import Iterator, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.attention_sinks.recorded_runs import per_prompt, sink_rule
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.experiment import Cost, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

CHANGES = ("control", "swap", "shift")
OUTCOMES = ("token", "position", "both", "neither")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: how often each outcome followed each change."""
    import dlm_lens as dl

    model = model_of(item, settings, bench)
    texts = chat(model, problems_of(settings, item["start"]), settings)
    done = dl.denoise(model, texts, **settings["sampler"])
    trials = dl.sinks.position_or_token(model, done, sink_rule(settings), steps=[0, done.steps // 2, -1]).trials
    counts = trials.groupby(["batch", "change", "outcome"]).size()
    return {
        "counts": [
            {change: [int(counts.get((row, change, outcome), 0)) for outcome in OUTCOMES] for change in CHANGES}
            for row in range(len(texts))
        ]
    }


def render(results: Results) -> Rendering:
    """Outcomes per change."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves = [], {}
    for model in results.models:
        for change in CHANGES:
            shares = [followed(results, model, change, outcome) for outcome in OUTCOMES]
            n = sum(sum(one[change]) for one in results.listed("counts", model=model))
            rows.append([model, change, *map(str, shares), str(n)])
            curves[f"{model}, {change}"] = list(enumerate(shares))
    head = ["model", "change", "sink goes with the token", "stays at the position", "both", "neither", "n trials"]
    table = Table("what became of the main sinks; 95% intervals over prompts", head, rows)
    figure = line_chart(curves, x="", y="share of the trials", ticks=OUTCOMES)
    return Rendering([table], {"outcomes": figure}, list(_findings(results)))


def followed(results: Results, model: str, change: str, *outcomes: str) -> Interval:
    """Share of a change's trials with one of these outcomes."""

    def terms(counts: dict[str, list[int]]) -> tuple[float, float]:
        return _hits(counts, change, outcomes), sum(counts[change])

    return per_prompt(results, model, ["counts"], terms, bounds=(0, 1))


def apart(results: Results, model: str, one: tuple[str, str], other: tuple[str, str]) -> Interval:
    """Difference of two shares of sinks, each (change, place), a mean over the prompts that have both.

    The place is "token", where the token went, or "position", where it was.
    """

    def terms(counts: dict[str, list[int]]) -> tuple[float, float]:
        sizes = [sum(counts[change]) for change, _ in (one, other)]
        if not all(sizes):
            return 0.0, 0.0
        first, second = (_hits(counts, change, (place, "both")) for change, place in (one, other))
        return first / sizes[0] - second / sizes[1], 1.0

    return per_prompt(results, model, ["counts"], terms, bounds=(-1, 1))


def _hits(counts: dict[str, list[int]], change: str, outcomes: Sequence[str]) -> int:
    return sum(counts[change][OUTCOMES.index(outcome)] for outcome in outcomes)


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.diffusion_models:
        there, chance = (followed(results, model, change, "token", "both") for change in ("swap", "control"))
        more = apart(results, model, ("swap", "token"), ("control", "token"))
        yield Finding.of(
            "sinks are driven not only by the position but by the token (5.1)",
            f"{model}, swap: a sink where the token went in {there} of the trials, {more} more than in the control",
            is_above(more, 0),
            why="agreement: more often than at the same place when two other tokens are exchanged",
            null=f"two other tokens exchanged: {chance}",
        )
        stays, unmoved = (followed(results, model, change, "position", "both") for change in ("swap", "control"))
        against = apart(results, model, ("swap", "token"), ("swap", "position"))
        yield Finding.of(
            "LLaDA's sinks are semantic rather than positional",
            f"{model}, swap: a sink where the token went {there}, where it was {stays}; difference {against}",
            is_above(against, 0),
            why="agreement: more often where the token went than where it was",
            null=f"two other tokens exchanged: {chance} and {unmoved}",
        )


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A run, and some hundred changed canvases of one row."""
    (one,) = recorded_runs.cost(item, settings)
    return [one, Cost(3 * 3 * one.rows, 16, one.positions, one.model)]


EXPERIMENT = recorded_runs.experiment(
    name="beyond-position",
    shows="2510.15731, Section 5.1",
    title="position or token: what a sink follows",
    metric="share of main sinks that go with their token, stay, both, or neither",
    small={"models": ["toy", "toy-gated"]},
    run=run,
    render=render,
    cost=cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
