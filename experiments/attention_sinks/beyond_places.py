"""Beyond Table 1: sinks hidden in one layer, or in one third of the steps, at a time."""

from collections.abc import Iterator

from dlm_lens.experiments.attention_sinks import hooked
from dlm_lens.experiments.attention_sinks.hooked import accuracy, difference, names
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, run_script
from dlm_lens.experiments.results import Results, Settings


def conditions(settings: Settings, model: str) -> dict[str, str]:
    """Everywhere, layer by layer, and in thirds of the answer's progress."""
    mask = f"mask_top_sinks({settings['columns']})"
    found = {"unmasked": "", "everywhere": mask}
    found |= {f"layer {layer}": f"at_layers({mask}, [{layer}])" for layer in settings["layers"]}
    parts = {"first third": "(0, 0.34)", "second third": "(0.34, 0.67)", "last third": "(0.67, 1)"}
    return found | {name: f"at_progress({mask}, {part})" for name, part in parts.items()}


def render(results: Results) -> Rendering:
    """Accuracy per place."""
    from dlm_lens.experiments.attention_sinks.drawing import lines

    curves = {
        model: [(n, accuracy(results, model, name)) for n, name in enumerate(names(results, model))]
        for model in results.models
    }
    title = "the strongest columns of every head hidden there only; 95% intervals (Wilson; paired bootstrap)"
    figure = lines(curves, x="hidden where", y="exact match", ticks=names(results, results.models[0]))
    return Rendering([hooked.table(results, title)], {"places": figure}, list(_findings(results)))


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
            )


EXPERIMENT = Experiment(
    name="beyond-places",
    shows="beyond 2510.15731, Table 1",
    title="sinks hidden in single layers and thirds of the run",
    metric="exact match of the final answer",
    small={**hooked.SMALL, "layers": [0, 1, 2, 3]},
    full={**hooked.FULL, "layers": list(range(0, 32, 4))},
    items=hooked.items(conditions),
    run=hooked.run,
    render=render,
    cost=hooked.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
