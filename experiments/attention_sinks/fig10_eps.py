"""Figure 10: the share of tokens that are sinks, as a function of eps."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0]
LEVELS = ("head", "layer", "model")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and level: the number of keys, and the share of them that are sinks at each eps."""
    import dlm_lens as dl

    found: dict[str, Any] = {"length": [], **{f"{level}_{name}": [] for level in LEVELS for name in ("n", "kept")}}
    for prompt_run in record_prompts(item, settings, bench):
        for level in LEVELS:
            table = dl.sinks.eps_sweep(prompt_run.received["all"], settings["values"], level=level)  # type: ignore[arg-type]
            found[f"{level}_n"].append(int(table["n"].iloc[0]))
            found[f"{level}_kept"].append(rounded(table["kept"].tolist(), 6))
        found["length"].append(int(table["S"].iloc[0]))
    return found


def render(results: Results) -> Rendering:
    """The share of keys that are not sinks over eps, per model and level."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    values = results.settings["values"]
    curves = {
        f"{model}, {level}": [(eps, removed(results, model, eps, level)) for eps in values]
        for model in results.models
        for level in LEVELS[:1]
    }
    rows = []
    for model in results.models:
        lengths = results.listed("length", model=model)
        for level in LEVELS:
            cells = [str(removed(results, model, eps, level)) for eps in (1.0, 3.0, 5.0) if eps in values]
            rows.append([model, level, f"{min(lengths)} to {max(lengths)}", *cells, str(len(lengths))])
    head = ["model", "level", "S", *[f"left out at eps = {eps:g}" for eps in (1.0, 3.0, 5.0) if eps in values],
            "n prompts"]  # fmt: skip
    table = Table("share of the keys that are no sink; relative to uniform; 95% intervals over prompts", head, rows)
    figure = line_chart(curves, x="eps of Eq. 3 (scores relative to uniform)", y="share of keys that are no sink")
    return Rendering([table], {"sweep": figure}, list(_findings(results)))


def removed(results: Results, model: str, eps: float, level: str = "head") -> Interval:
    """Share of the keys that are not sinks by Eq. 3."""
    place = results.settings["values"].index(eps)
    n = results.listed(f"{level}_n", model=model)
    kept = [share[place] for share in results.listed(f"{level}_kept", model=model)]
    return ratio_over_prompts([(1 - k) * m for k, m in zip(kept, n, strict=True)], n)


def _findings(results: Results) -> Iterator[Finding]:
    if 3.0 not in results.settings["values"]:
        return
    for model in results.models:
        here = removed(results, model, 3.0)
        yield Finding(
            "eps = 3 filters out at least 96% of the tokens of a sequence of 64",
            f"{model}: {here} (every head)",
            "agrees" if here.low >= 0.96 else "disagrees" if here.high < 0.96 else "undecided",
            "on the scale relative to uniform, our reading; on the printed one no score can pass 3",
        )


PAPER = (
    Table("Appendix B and Figure 10", ["statement", "number"], [
        ["tokens left out at eps = 3, S = 64, \"most all the analysed DLMs\"", "at least 96%"],
    ]),
)  # fmt: skip

EXPERIMENT = recorded_runs.experiment(
    name="fig10-eps",
    shows="2510.15731, Figure 10",
    title="share of tokens that are no sink, over the threshold eps",
    metric="share of (step, layer, head, key) that Eq. 3 leaves out",
    small={"values": VALUES, "models": ["toy", "toy-sink", "toy-gated", "toy-ar"]},
    full={"values": VALUES, "sampler": {"gen_length": 32, "steps": 32}},
    run=run,
    render=render,
    paper=PAPER,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
