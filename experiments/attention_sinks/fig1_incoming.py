"""Figure 1: the attention that every token receives at every step, and whether the largest sink moves."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded, sink_rule
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: positions of the strongest key over the run, and patterns whose largest sink ends elsewhere."""
    import dlm_lens as dl

    found: dict[str, Any] = {"distinct": [], "moved": [], "compared": [], "strongest": []}
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        received = prompt_run.received["all"]
        mean = received.at_level("model").values[:, 0, 0, 0]
        best = mean.nan_to_num(nan=-1.0)
        known = best.amax(-1) >= 0
        found["distinct"].append(len(set(best.argmax(-1)[known].tolist())))
        found["strongest"].append(rounded(best.amax(-1)[known].mean()))
        measures = dl.trajectories(received, sink_rule(settings)).measures
        found["moved"].append(int(measures["moved_over_run"].sum()))
        found["compared"].append(int(measures["moved_over_run"].count()))
        if item["start"] == 0 and number == 0:
            there = ~mean.isnan().all(0)
            found["map"] = rounded(mean[:, there], 2)
    return found


def render(results: Results) -> Rendering:
    """The map of each model's first prompt, and how often the largest sink moves."""
    rows = [
        [
            model,
            str(mean_over_prompts(results.listed("distinct", model=model))),
            str(mean_over_prompts(results.listed("strongest", model=model))),
            f"{moved(results, model)} of {sum(results.listed('compared', model=model))}",
            str(len(results.listed("distinct", model=model))),
        ]
        for model in results.models
    ]
    head = ["model", "places of the strongest key over the run", "its score (1: uniform)",
            "patterns whose largest sink ends elsewhere", "n prompts"]  # fmt: skip
    firsts = {model: results.where(model=model, start=0) for model in results.models}
    maps = {model: found[0].value["map"] for model, found in firsts.items() if found}
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    figure = heat_maps(
        {name: _with_nan(rows) for name, rows in maps.items()},
        x="position",
        y="step",
        bar="received, model mean (1: uniform)",
    )
    table = Table("scale: relative to uniform; mean pattern for places and score, every head for the last column; "
                  "95% intervals over prompts", head, rows)  # fmt: skip
    return Rendering([table], {"incoming": figure}, list(_findings(results)))


def moved(results: Results, model: str) -> Interval:
    """Of the patterns with a sink at the first and the last step, the share whose largest sink moved."""
    return ratio_over_prompts(results.listed("moved", model=model), results.listed("compared", model=model))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        here, n = moved(results, model), sum(results.listed("compared", model=model))
        if results.is_causal(model):
            yield Finding(
                "an AR model's sinks do not shift",
                f"{model}: {n} patterns have a sink at both ends of the run, of which {here} moved",
                "agrees"
                if n >= 30 and here.high < 0.1
                else "disagrees"
                if n >= 30 and here.low > 0.1
                else "undecided",
                "on the relative scale the first token of an AR prefix is no sink by its mask alone; undecided "
                "below 30 patterns",
            )
            continue
        yield Finding(
            "DLM sinks shift across the sequence as tokens are unmasked (caption)",
            f"{model}: in {here} of {n} patterns the largest sink ends elsewhere",
            "agrees" if here.low > 0.1 else "disagrees" if here.high < 0.1 else "undecided",
            "agreement is taken as more than a tenth; the paper's caption has no number",
        )


def _with_nan(rows: list[list[float | None]]) -> list[list[float]]:
    return [[float("nan") if value is None else value for value in row] for row in rows]


EXPERIMENT = recorded_runs.experiment(
    name="fig1-incoming",
    shows="2510.15731, Figure 1",
    title="incoming attention of every token over the denoising steps",
    metric="received attention relative to uniform; share of patterns whose largest sink moved over the run",
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
