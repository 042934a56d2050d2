"""Figure 8: (a) static sinks at the beginning; (b) sinks that follow the unmasking frontier."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded, sink_rule
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings

BEGINNING = 4
"""Number of first positions that count as the beginning."""

REFERENCES = ("rightmost mask", "leftmost mask", "frontier")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: static patterns, those at the beginning, and relative distances to the frontier."""
    import dlm_lens as dl

    found: dict[str, Any] = {"static": [], "first": [], "steps": [], "at_first": []}
    found |= {name: [] for name in REFERENCES}
    for prompt_run in record_prompts(item, settings, bench):
        paths = dl.trajectories(prompt_run.received["all"], sink_rule(settings))
        shift = int((~prompt_run.run.attention_mask[prompt_run.row]).sum())
        static = paths.kinds == "static"
        beginning = (paths.static_position - shift).numpy() < BEGINNING
        found["static"].append(int(static.sum()))
        found["first"].append(int((static & beginning).sum()))
        there = (paths.main >= 0) & (paths.main < paths.canvas)
        found["steps"].append(int(there.sum()))
        found["at_first"].append(int((there & (paths.main - shift < BEGINNING)).sum()))
        table = dl.sinks.frontier_alignment(paths).set_index("reference")
        columns = [table[name].to_dict() for name in ("ratio", "correlation")]
        for name in REFERENCES:
            found[name].append(rounded([float(column[name]) for column in columns]))
    return found


def render(results: Results) -> Rendering:
    """Sinks at the beginning, and distances to the frontier."""
    rows: list[list[str]] = []
    aligned: list[list[str]] = []
    for model in results.models:
        count = len(results.listed("static", model=model))
        rows.append([model, str(at_beginning(results, model)),
                     str(ratio_over_prompts(results.listed("at_first", model=model),
                                            results.listed("steps", model=model))), str(count)])  # fmt: skip
        aligned.extend([
            model, name,
            *(str(mean_over_prompts([pair[at] for pair in results.listed(name, model=model)])) for at in (0, 1)),
            str(count),
        ] for name in REFERENCES)  # fmt: skip
    tables = [
        Table(f"(a) static sinks among the first {BEGINNING} positions; 95% intervals over prompts",
              ["model", "of the static patterns", "largest sink there, of steps with a sink", "n prompts"], rows),
        Table("(b) distance of the largest sink over that of a random key (below 1: closer), and its "
              "correlation with the reference over steps",
              ["model", "reference", "ratio", "correlation", "n prompts"], aligned),
    ]  # fmt: skip
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    curves = {
        model: [(n, mean_over_prompts([pair[0] for pair in results.listed(name, model=model)]))
                for n, name in enumerate(REFERENCES)]
        for model in results.models
    }  # fmt: skip
    figure = line_chart(curves, x="distance to", y="distance of the largest sink over chance", ticks=REFERENCES)
    return Rendering(tables, {"frontier": figure}, list(_findings(results)))


def at_beginning(results: Results, model: str) -> Interval:
    """Of the static patterns, the share whose sink is among the first positions."""
    return ratio_over_prompts(results.listed("first", model=model), results.listed("static", model=model))


def alignment(results: Results, model: str, name: str) -> Interval:
    """Distance of the largest sink to a reference, divided by that of a random key."""
    return mean_over_prompts([pair[0] for pair in results.listed(name, model=model)])


def _findings(results: Results) -> Iterator[Finding]:
    # An AR prefix has no masked position after it: its frontier is its end.
    for model in results.diffusion_models:
        first, closer = at_beginning(results, model), alignment(results, model, "rightmost mask")
        yield Finding(
            "MMaDA often has a static sink at the beginning of the sequence (8a)",
            f"{model}: {first} of the static patterns (of {sum(results.listed('static', model=model))})",
            "agrees" if first.low > 0.25 else "disagrees" if first.high < 0.25 else "undecided",
            'agreement is taken as a quarter; the paper says "often"',
        )
        yield Finding(
            "Dream's sinks start at the rightmost mask and follow the frontier (8b)",
            f"{model}: distance to the rightmost mask over chance: {closer}",
            "agrees" if closer.high < 0.8 else "disagrees" if closer.low > 0.8 else "undecided",
            "another sampler: these models decode blocks from left to right, Dream has none",
        )


EXPERIMENT = recorded_runs.experiment(
    name="fig8-static",
    shows="2510.15731, Figure 8",
    title="sinks at the beginning, and sinks at the unmasking frontier",
    metric="share of static sinks at the first positions; distance to the frontier over that of a random key",
    full={"models": ["Gen-Verse/MMaDA-8B-MixCoT", "Dream-org/Dream-v0-Instruct-7B"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
