"""Beyond Table 1: sinks hidden in one layer, or in one third of the run, at a time."""

from collections.abc import Iterator

from dlm_lens.experiments.attention_sinks import hook_conditions
from dlm_lens.experiments.attention_sinks.hook_conditions import accuracy, difference, names
from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.results import Results, Settings


def conditions(settings: Settings, model: str) -> dict[str, str]:
    """All layers and steps, single layers, and thirds of the answer's progress."""
    mask = f"mask_top_sinks({settings['columns']})"
    found = {"unmasked": "", "everywhere": mask}
    found |= {f"layer {layer}": f"at_layers({mask}, [{layer}])" for layer in settings["layers"]}
    parts = {"first third": "(0, 0.34)", "second third": "(0.34, 0.67)", "last third": "(0.67, 1)"}
    return found | {name: f"at_progress({mask}, {part})" for name, part in parts.items()}


def render(results: Results) -> Rendering:
    """Exact match per condition."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    curves = {
        model: [(n, accuracy(results, model, name)) for n, name in enumerate(names(results, model))]
        for model in results.models
    }
    title = "the strongest columns of every head hidden there only; 95% intervals (Wilson; paired bootstrap)"
    figure = line_chart(curves, x="hidden where", y="exact match", ticks=names(results, results.models[0]))
    return Rendering([hook_conditions.table(results, title)], {"places": figure}, list(_findings(results)))


def _findings(results: Results) -> Iterator[Finding]:
    layers = [f"layer {layer}" for layer in results.settings["layers"]]
    for model in results.models:
        for kind, places in (
            ("layer", layers),
            ("third of the run", ["first third", "second third", "last third"]),
        ):
            worst = min(places, key=lambda name: accuracy(results, model, name).value)
            yield Finding(
                "not measured",
                f"{model}: the {kind} that costs most is {worst}: {difference(results, model, worst, 'unmasked')}; "
                f"everywhere: {difference(results, model, 'everywhere', 'unmasked')}",
                "no counterpart",
                f"the largest of {len(places)}, chosen after the numbers were seen",
            )


EXPERIMENT = hook_conditions.experiment(
    name="beyond-places",
    shows="beyond 2510.15731, Table 1",
    title="sinks hidden in single layers and thirds of the run",
    metric="exact match of the final answer",
    small={"layers": [0, 1, 2, 3]},
    full={"layers": list(range(0, 32, 4))},
    conditions=conditions,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
