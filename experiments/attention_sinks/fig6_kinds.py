"""Figure 6: (a) different sinks for masked and unmasked queries; (b) transient sinks."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, sink_rule
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and layer: steps at which both query classes have a sink, and at which it differs; lifetimes."""
    import dlm_lens as dl
    from dlm_lens.sinks import compare_query_classes

    found: dict[str, Any] = {"both": [], "differ": [], "lives": [], "transient": []}
    for prompt_run in record_prompts(item, settings, bench, ("all", "masked", "unmasked")):
        table = compare_query_classes(
            prompt_run.received["masked"], prompt_run.received["unmasked"], sink_rule(settings)
        )
        table["apart"] = (table["differ"] * table["both"]).fillna(0)
        layers = table.groupby("layer", sort=True)[["both", "apart"]].sum()
        found["both"].append([int(value) for value in layers["both"]])
        found["differ"].append([round(value) for value in layers["apart"]])
        lives = dl.trajectories(prompt_run.received["all"], sink_rule(settings)).table()
        # A sink that lasts to the end of the run has no measured lifetime.
        whole = lives[lives["died"]]
        found["lives"].append(len(whole))
        found["transient"].append(int(whole["transient"].sum()))
    return found


def render(results: Results) -> Rendering:
    """How often the main sinks differ per layer, and the share of transient lifetimes."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves, short = [], {}, []
    for model in results.models:
        layers = len(results.listed("both", model=model)[0])
        points = [(layer, differing(results, model, layer)) for layer in range(layers)]
        curves[model] = points
        for layer, share in points:
            rows.append(
                [model, str(layer), str(share), str(sum(b[layer] for b in results.listed("both", model=model)))]
            )
        short.append([model, str(transient(results, model)), str(sum(results.listed("lives", model=model)))])
    tables = [
        Table("(a) steps at which the main sink of masked queries is another than that of written ones, of those "
              "where both have one; 95% intervals over prompts",
              ["model", "layer", "differ", "n steps of heads"], rows),
        Table("(b) lives of at most 2 steps, of those that were seen to end",
              ["model", "transient", "n lives"], short),
    ]  # fmt: skip
    figure = line_chart(curves, x="layer", y="masked and written queries: main sinks differ")
    return Rendering(tables, {"split": figure}, list(_findings(results)))


def differing(results: Results, model: str, layer: int) -> Interval:
    """Of a layer's steps where masked and unmasked queries both have a main sink, the share where these differ."""
    return ratio_over_prompts(
        [found[layer] for found in results.listed("differ", model=model)],
        [found[layer] for found in results.listed("both", model=model)],
    )


def transient(results: Results, model: str) -> Interval:
    """Share of the ended lifetimes of at most 2 steps."""
    return ratio_over_prompts(results.listed("transient", model=model), results.listed("lives", model=model))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        last = len(results.listed("both", model=model)[0]) - 1
        first, deepest = differing(results, model, 0), differing(results, model, last)
        yield Finding(
            "LLaDA, deepest layers: masked and unmasked tokens maintain separate sinks (6a)",
            f"{model}: they differ in {deepest} of the steps of layer {last}; layer 0: {first}",
            "agrees" if deepest.low > 0.1 and deepest.low > first.high
            else "disagrees" if deepest.high < 0.1 or deepest.high < first.low else "undecided",
            "agreement is taken as more than a tenth, and more than in the first layer",
        )  # fmt: skip
        short = transient(results, model)
        yield Finding(
            "LLaDA: sinks that appear for one step and vanish exist, as edge cases (6b)",
            f"{model}: {short} of the ended lives",
            "agrees" if short.value > 0 and short.high < 0.5 else "disagrees" if short.low > 0.5 else "undecided",
            "agreement is taken as some, and less than half",
        )


EXPERIMENT = recorded_runs.experiment(
    name="fig6-kinds",
    shows="2510.15731, Figure 6",
    title="sinks of masked against written queries, and transient sinks",
    metric="share of steps with different main sinks; share of lives of at most 2 steps",
    small={"models": ["toy", "toy-gated"]},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
