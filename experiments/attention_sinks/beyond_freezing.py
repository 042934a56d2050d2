"""Beyond Table 1: hiding the columns that were sinks at one step, against hiding the sinks of every step."""

from collections.abc import Iterator

from dlm_lens.experiments.attention_sinks import hook_conditions
from dlm_lens.experiments.attention_sinks.hook_conditions import difference
from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.results import Results, Settings
from dlm_lens.experiments.verdicts import is_below


def conditions(settings: Settings, model: str) -> dict[str, str]:
    """From a step on: the sinks of that step, those of every step, random columns as many or of the same mass."""
    k = settings["columns"]
    mask = f"mask_top_sinks({k})"
    found = {"unmasked": ""}
    for step in settings["from_steps"]:
        steps = f"range({step}, {settings['steps']})"
        found[f"frozen at {step}"] = f"freeze_sinks(TopK({k}), step={step})"
        found[f"followed from {step}"] = f"at_steps({mask}, {steps})"
        found[f"random from {step}"] = f"mask_random(like=at_steps({mask}, {steps}))"
        found[f"same mass from {step}"] = f"mask_random(like=at_steps({mask}, {steps}), match='mass')"
    return found


def render(results: Results) -> Rendering:
    """Exact match, and followed minus frozen."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    curves = {
        f"{model}, {kind}": [
            (
                step,
                hook_conditions.accuracy(results, model, f"{kind} {'at' if kind == 'frozen' else 'from'} {step}"),
            )
            for step in results.settings["from_steps"]
        ]
        for model in results.models
        for kind in ("frozen", "followed", "random", "same mass")
    }
    title = "the strongest columns of every head, hidden from a step on; 95% intervals (Wilson; paired bootstrap)"
    figure = line_chart(curves, x="from step", y="exact match")
    return Rendering([hook_conditions.table(results, title)], {"freezing": figure}, list(_findings(results)))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        for step in results.settings["from_steps"]:
            more = difference(results, model, f"followed from {step}", f"frozen at {step}")
            yield Finding.of(
                "sinks move, so that a mask has to follow them (not measured)",
                f"{model}, step {step}: followed minus frozen: {more}",
                is_below(more, 0),
                why="agreement: below 0, following costs more than hiding where the sinks were",
                null="0: sinks that stay where they are",
            )


EXPERIMENT = hook_conditions.experiment(
    name="beyond-freezing",
    shows="beyond 2510.15731, Table 1",
    title="hiding fixed against moving sinks",
    metric="exact match of the final answer",
    small={"from_steps": [4, 16], "steps": 32},
    full={"from_steps": [64, 128], "steps": 256, "sampler": {"gen_length": 256},
          "models": ["GSAI-ML/LLaDA-8B-Instruct"]},
    conditions=conditions,
    render=render,
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
