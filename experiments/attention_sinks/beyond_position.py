"""Section 5.1: does a sink stay at its position, or move with its token?"""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.attention_sinks.recorded_runs import sink_rule
from dlm_lens.experiments.experiment import Cost, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings

CHANGES = ("control", "swap", "shift")
OUTCOMES = ("token", "position", "both", "neither")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: how often each outcome followed each change."""
    import dlm_lens as dl

    model = bench.model(item["model"])
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


def followed(results: Results, model: str, change: str, outcome: str) -> Interval:
    """Share of a change's trials with this outcome."""
    counts = [one[change] for one in results.listed("counts", model=model)]
    return ratio_over_prompts([one[OUTCOMES.index(outcome)] for one in counts], [sum(one) for one in counts])


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.diffusion_models:
        token, position = (followed(results, model, "swap", outcome) for outcome in ("token", "position"))
        yield Finding(
            "sinks are driven not only by the position but by the token (LLaDA: semantic; Dream: positional)",
            f"{model}, swap: with the token {token}, at the position {position}",
            "agrees" if token.low > position.high else "disagrees" if token.high < position.low else "undecided",
            "agreement is taken as the token winning",
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
