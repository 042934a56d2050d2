"""Section 5.3: can the past context be hidden, as long as sinks at future positions are kept?"""

from collections.abc import Iterator

from dlm_lens.experiments.attention_sinks import hook_conditions
from dlm_lens.experiments.attention_sinks.hook_conditions import accuracy, difference
from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.results import Results, Settings


def conditions(settings: Settings, model: str) -> dict[str, str]:
    """Every query sees a window of the past and all of the future, without and with the strongest sinks."""
    found = {"unmasked": ""}
    for window in settings["windows"]:
        found[f"window {window}"] = f"keep_only((), window={window})"
        found[f"window {window} and sinks"] = f"keep_only({settings['columns']}, window={window})"
    return found


def render(results: Results) -> Rendering:
    """Exact match over window sizes."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    curves = {
        f"{model}{more}": [(w, accuracy(results, model, f"window {w}{more}")) for w in results.settings["windows"]]
        for model in results.models
        for more in ("", " and sinks")
    }
    title = "queries see the last so many positions and, in a DLM, all later ones; 95% intervals"
    figure = line_chart(curves, x="positions of the past that a query keeps", y="exact match")
    return Rendering([hook_conditions.table(results, title)], {"context": figure}, list(_findings(results)))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        for window in results.settings["windows"]:
            lost = difference(results, model, f"window {window}", "unmasked")
            if results.is_causal(model):
                yield Finding(
                    "discarding the past is catastrophic for AR models",
                    f"{model}, window {window}: {lost}",
                    "agrees" if lost.high < -0.5 else "disagrees" if lost.low > -0.5 else "undecided",
                    "agreement is taken as a loss of more than half",
                )
                continue
            yield Finding(
                '"moving sinks allow the model to discard the past context without significant degradation" (5.3)',
                f"{model}, window {window}: {lost}",
                "agrees" if lost.low > -0.05 else "disagrees" if lost.high < -0.05 else "undecided",
                "the past holds the numbers that the problem asks for; the paper measured nothing here",
            )


EXPERIMENT = hook_conditions.experiment(
    name="beyond-context",
    shows="2510.15731, Section 5.3",
    title="the past context discarded, with and without sinks",
    metric="exact match of the final answer",
    small={"models": ["toy", "toy-ar"], "windows": [8, 32], "columns": 4},
    full={"windows": [32, 128], "columns": 4},
    conditions=conditions,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
