"""Figure 4: a sink that moves from one step to the next, and how often that happens."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    PromptRun,
    head_pattern,
    record_prompts,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: patterns of each kind, moves and switches; of the first prompt also the clearest move."""
    import dlm_lens as dl

    names = ("patterns", "static", "moving", "unsettled", "moves", "switches", "pairs")
    found: dict[str, Any] = {name: [] for name in names}
    diffusion = getattr(bench.model(item["model"]).config, "mask_token_id", None) is not None
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        paths = dl.trajectories(prompt_run.received["all"], sink_rule(settings))
        kinds = paths.kinds.flatten().tolist()
        found["patterns"].append(len(kinds))
        for kind in ("static", "moving", "unsettled"):
            found[kind].append(kinds.count(kind))
        found["moves"].append(int((paths.before >= 0).sum()))
        found["switches"].append(int(paths.switched.sum()))
        found["pairs"].append(int((paths.defined.sum(0) - 1).clamp(min=0).sum()))
        if item["start"] == 0 and number == 0 and diffusion:
            found["example"] = _example(bench.model(item["model"]), prompt_run, paths)
    return found


def _example(model: Any, prompt_run: PromptRun, paths: Any) -> dict[str, Any] | None:
    """The move whose smaller peak score is largest, and the pattern at the steps before and after it."""
    table = paths.table()
    moves = table[table["came_from"].notna() & table["position"].notna()]
    if moves.empty:
        return None
    previous = {
        index: table[(table["trajectory"] == line["trajectory"]) & (table["position"] == line["came_from"])][
            "peak"
        ].max()
        for index, line in moves.iterrows()
    }
    line = moves.loc[max(previous, key=lambda index: min(previous[index], moves.loc[index, "peak"]))]
    layer, head = int(line["layer"]), int(line["head"])
    before, after = int(line["first_step"]) - 1, int(line["first_step"])
    shift = int(prompt_run.run.padding[prompt_run.row])

    def pattern(step: int) -> Any:
        whole = head_pattern(model, prompt_run.run, step=step, row=prompt_run.row, layer=layer, head=head)
        return whole[:, : len(whole)]  # without learned sink tokens

    return {
        "layer": layer, "head": head, "steps": [before, after],
        "positions": [int(line["came_from"]), int(line["position"])],
        "tokens": [str(prompt_run.run.tokenizer.decode([prompt_run.run.tokens[prompt_run.row, p + shift]]))
                   for p in (int(line["came_from"]), int(line["position"]))],
        "maps": [rounded(pattern(step), 3) for step in (before, after)],
    }  # fmt: skip


def render(results: Results) -> Rendering:
    """Kinds of patterns, rates of moves, and the example's maps."""
    from dlm_lens.experiments.attention_sinks.charts import heat_maps

    rows, panels, marks = [], {}, {}
    for model in results.models:
        count = len(results.listed("patterns", model=model))
        rate = ratio_over_prompts(results.listed("moves", model=model), results.listed("pairs", model=model))
        rows.append([
            model, *(str(share(results, model, kind)) for kind in ("static", "moving", "unsettled")),
            f"{100 * rate.value:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]", str(count),
        ])  # fmt: skip
        for record in results.where(model=model, start=0):
            example = record.value.get("example") or {}
            names = ("steps", "positions", "maps")
            for step, place, values in zip(*(example.get(name, ()) for name in names), strict=True):
                title = f"{model}, layer {example['layer']}, head {example['head']}, step {step}"
                panels[title] = values
                marks[title] = [(place, -0.5)]
    head = [
        "model",
        "static patterns",
        "moving",
        "unsettled",
        "moves per 100 pairs of steps of a pattern",
        "n prompts",
    ]
    table = Table("parts of all patterns (layer x head x prompt), the rest have none; 95% intervals over prompts",
                  head, rows)  # fmt: skip
    figures = {"maps": heat_maps(panels, x="key", y="query", bar="attention", marks=marks)} if panels else {}
    return Rendering([table], figures, list(_findings(results)))


def share(results: Results, model: str, kind: str) -> Interval:
    """The share of the patterns of this kind."""
    return ratio_over_prompts(results.listed(kind, model=model), results.listed("patterns", model=model))


def _findings(results: Results) -> Iterator[Finding]:
    baseline = next((model for model in results.models if results.is_causal(model)), None)
    for model in results.models:
        if model == baseline:
            continue
        here = share(results, model, "moving")
        other = None if baseline is None else share(results, baseline, "moving")
        yield Finding(
            "DLMs have moving sinks, which AR models do not",
            f"{model}: {here} of the patterns" + ("" if other is None else f"; {baseline}: {other}"),
            "disagrees" if here.high < 0.01 or (other is not None and other.low >= here.low)
            else "agrees" if other is not None and here.low > other.high else "undecided",
            "moving as defined in docs/trajectories.md; in an AR run every step brings a new key",
        )  # fmt: skip


EXPERIMENT = recorded_runs.experiment(
    name="fig4-moving",
    shows="2510.15731, Figure 4",
    title="sinks that move between two steps",
    metric="share of (layer, head, prompt) patterns whose sink moves; moves per pair of steps",
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
