"""Figure 1: what every token receives, step by step, and whether the strongest ones change place."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import watching
from dlm_lens.experiments.attention_sinks.models import is_causal
from dlm_lens.experiments.attention_sinks.watching import numbers, rule, watch
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: at how many places the strongest key is, and how many patterns end elsewhere than they began."""
    import dlm_lens as dl

    found: dict[str, Any] = {"distinct": [], "moved": [], "compared": [], "strongest": []}
    for number, watched in enumerate(watch(item, settings, bench)):
        received = watched.received["all"]
        mean = received.at_level("model").values[:, 0, 0, 0]
        best = mean.nan_to_num(nan=-1.0)
        known = best.amax(-1) >= 0
        found["distinct"].append(len(set(best.argmax(-1)[known].tolist())))
        found["strongest"].append(numbers(best.amax(-1)[known].mean()))
        measures = dl.trajectories(received, rule(settings)).measures
        found["moved"].append(int(measures["moved_over_run"].sum()))
        found["compared"].append(int(measures["moved_over_run"].count()))
        if item["start"] == 0 and number == 0:
            there = ~mean.isnan().all(0)
            found["map"] = numbers(mean[:, there], 2)
    return found


def render(results: Results) -> Rendering:
    """The map of the first prompt per model, and how much moves."""
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
    from dlm_lens.experiments.attention_sinks.drawing import heat

    figure = heat(
        {name: _wide(rows) for name, rows in maps.items()},
        x="position",
        y="step",
        bar="received, model mean (1: uniform)",
    )
    table = Table("scale: relative to uniform; mean pattern for places and score, every head for the last column; "
                  "95% intervals over prompts", head, rows)  # fmt: skip
    return Rendering([table], {"incoming": figure}, list(_findings(results)))


def moved(results: Results, model: str) -> Interval:
    """Share of the patterns with a sink at both ends of the run whose largest sink stands elsewhere in the end."""
    return ratio_over_prompts(results.listed("moved", model=model), results.listed("compared", model=model))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        here, n = moved(results, model), sum(results.listed("compared", model=model))
        if is_causal(results, model):
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


def _wide(rows: list[list[float | None]]) -> list[list[float]]:
    return [[float("nan") if value is None else value for value in row] for row in rows]


EXPERIMENT = Experiment(
    name="fig1-incoming",
    shows="2510.15731, Figure 1",
    title="incoming attention of every token over the denoising steps",
    metric="received attention relative to uniform; share of patterns whose largest sink moved over the run",
    small=watching.SMALL,
    full=watching.FULL,
    items=watching.items,
    run=run,
    render=render,
    cost=watching.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
