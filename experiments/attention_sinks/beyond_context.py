"""Section 5.3: can the past context be hidden, as long as sinks at future positions are kept?"""

from collections.abc import Iterator

from dlm_lens.experiments.attention_sinks import hook_conditions
from dlm_lens.experiments.attention_sinks.hook_conditions import accuracy, difference
from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_below

CATASTROPHE, SIGNIFICANT = -0.5, -0.05
"""Margins of the two claims, changes of exact match: more than half is lost; less than 0.05 is."""


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
        columns = settings_of(results.settings, model)["columns"]
        for window in results.settings["windows"]:
            lost = difference(results, model, f"window {window}", "unmasked")
            if results.is_causal(model):
                yield Finding.of(
                    "discarding the past is catastrophic for AR models",
                    f"{model}, window {window}: {lost}",
                    is_below(lost, CATASTROPHE),
                    why=f"agreement: a loss of more than {-CATASTROPHE}, set before the runs",
                    null="0: the past is not needed",
                )
            else:
                yield Finding.of(
                    '"moving sinks allow the model to discard the past context without significant degradation" '
                    "(5.3)",
                    f"{model}, window {window}: {lost}",
                    is_above(lost, SIGNIFICANT),
                    why=f"agreement: a loss of less than {-SIGNIFICANT}, set before the runs; the past holds the "
                    "numbers that the problem asks for, and the paper measured nothing here",
                    null="0: the past is not needed",
                )
            kept = difference(results, model, f"window {window} and sinks", f"window {window}")
            yield Finding(
                "what the sinks alone restore is not measured",
                f"{model}, window {window}: {columns} sinks kept per head change it by {kept}",
                "no counterpart",
                "no control keeps other columns with as much attention",
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
