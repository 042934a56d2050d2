"""Figure 4: a sink that moves from one step to the next, and how often that happens."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import (
    PromptRun,
    head_pattern,
    ratio,
    record_prompts,
    rounded,
    sink_rule,
)
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.attention_sinks.two_scales import (
    BESIDE,
    NAMED,
    PLOTTED,
    SCALES,
    effective_cases,
    followed,
    moving_at_random_times,
    pairs,
    uniform_attention,
)
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, bounded_share, unpaired_difference
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

NO_EXCESS = 0.0
"""Bound of "DLMs have moving sinks": more moving patterns than if the same sinks came and went at random times."""

NO_DIFFERENCE = 0.0
"""Bound of "not observed in ARMs": the DLM's share of moving patterns minus the AR model's."""

KINDS = ("static", "moving", "unsettled")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt and scale: patterns of each kind and moves, as measured and at random times; one clear move."""
    names = (*KINDS, "with sink", "moves", "switches", "chance moving", "chance moves", "beyond",
             *(f"uniform {kind}" for kind in KINDS))  # fmt: skip
    found: dict[str, Any] = {f"{scale} {name}": [] for scale in SCALES for name in names}
    found |= {"patterns": [], "pairs": []}
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        received = prompt_run.received["all"]
        followed_on = followed(received, sink_rule(settings))
        even = followed(uniform_attention(received), sink_rule(settings))
        for scale, paths in followed_on.items():
            kinds = paths.kinds.flatten().tolist()
            moving, moves = moving_at_random_times(paths, seed=item["start"] + number)
            values = {kind: kinds.count(kind) for kind in KINDS} | {
                "with sink": len(kinds) - kinds.count("none"), "moves": int((paths.before >= 0).sum()),
                "switches": int(paths.switched.sum()), "chance moving": moving, "chance moves": moves,
                "beyond": kinds.count("moving") - moving,
            } | {f"uniform {kind}": even[scale].kinds.flatten().tolist().count(kind) for kind in KINDS}  # fmt: skip
            for name, value in values.items():
                found[f"{scale} {name}"].append(rounded(value))
        found["patterns"].append(int(paths.kinds.size))
        found["pairs"].append(int((paths.defined.sum(0) - 1).clamp(min=0).sum()))
        first = item["start"] == 0 and number == 0 and not item.get("network", 0)
        if first and not prompt_run.run.autoregressive:
            found["example"] = _example(model_of(item, settings, bench), prompt_run, followed_on[PLOTTED])
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
        rows += [_line(results, model, scale) for scale in SCALES]
        for record in results.where(model=model, start=0):
            example = record.value.get("example") or {}
            names = ("steps", "positions", "maps")
            for step, place, values in zip(*(example.get(name, ()) for name in names), strict=True):
                title = f"{model}, layer {example['layer']}, head {example['head']}, step {step}"
                panels[title] = values
                marks[title] = [(place, -0.5)]
    head = ["model", "scale", "static patterns", "moving", "unsettled", "moving at random times",
            "moves per 100 pairs of steps of a pattern", "at random times", "uniform attention",
            "n runs"]  # fmt: skip
    table = Table("parts of all patterns (layer x head x prompt), the rest have none; 95% intervals over prompts "
                  "(and networks)", head, rows)  # fmt: skip
    figures = {"maps": heat_maps(panels, x="key", y="query", bar="attention", marks=marks)} if panels else {}
    return Rendering([table], figures, list(_findings(results)), [
        "What to see: left and right are two neighbouring steps of one head. The triangle marks the sink of the "
        "step: one bright column fades and another brightens. Chosen: the move of the first prompt whose smaller "
        "peak is largest.",
        '"At random times": every sink keeps its position and its number of steps, and begins at a random step, so '
        "that the end of one and the onset of another coincide by chance only.",
        BESIDE,
    ])  # fmt: skip


def _line(results: Results, model: str, scale: str) -> list[str]:
    return [
        model, NAMED[scale], *(str(share(results, model, kind, scale)) for kind in KINDS),
        str(chance(results, model, scale)), _rate(results, model, "moves", scale),
        _rate(results, model, "chance moves", scale), uniform(results, model, scale),
        str(len(results.listed("patterns", model=model))),
    ]  # fmt: skip


def share(results: Results, model: str, kind: str, scale: str = PLOTTED) -> Interval:
    """The share of the patterns of this kind, of `KINDS` or "chance moving", on a scale of `SCALES`."""
    return _of_patterns(results, model, f"{scale} {kind}", "patterns", scale)


def _of_patterns(results: Results, model: str, name: str, of: str, scale: str) -> Interval:
    """A share; of no or all patterns with Wilson's interval of as many as the static share says they are worth."""
    found = ratio(results, model, name, of, bounds=(0, 1))
    static = ratio(results, model, f"{scale} static", "patterns", bounds=(0, 1))
    return bounded_share(found, effective_cases(sum(results.listed("patterns", model=model)), static))


def chance(results: Results, model: str, scale: str = PLOTTED) -> Interval:
    """The share of moving patterns if the same sinks came and went at random times."""
    return share(results, model, "chance moving", scale)


def apart(results: Results, model: str, baseline: str, scale: str) -> Interval:
    """A model's share of moving patterns minus another's."""
    return unpaired_difference(*(share(results, name, "moving", scale) for name in (model, baseline)))


def uniform(results: Results, model: str, scale: str) -> str:
    """What uniform attention under the model's mask gives, one pattern per prompt."""
    counts = {kind: results.listed(f"{scale} uniform {kind}", model=model) for kind in KINDS}
    n = len(counts["static"])
    found = ", ".join(f"{sum(values) / n:.2f} {kind}" for kind, values in counts.items() if sum(values))
    return found or "no sink"


def _rate(results: Results, model: str, name: str, scale: str) -> str:
    """Moves per 100 pairs of steps. A pattern could move more than once in a pair; none comes near to that."""
    rate = _of_patterns(results, model, f"{scale} {name}", "pairs", scale)
    return f"{100 * rate.value:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.diffusion_models:
        beyond = ratio(results, model, f"{PLOTTED} beyond", "patterns", bounds=(-1, 1))
        yield Finding.of(
            "DLMs have moving sinks (4.2)",
            f"{model}: {share(results, model, 'moving')} of the patterns, {beyond} more than at random times",
            is_above(beyond, NO_EXCESS),
            why="more moving patterns than the same sinks at random times; without sink tokens both scales "
            "are one in a DLM",
            null=f"at random times: {chance(results, model)}",
        )
    for model, baseline, scale in pairs(results):
        one, other = (share(results, name, "moving", scale) for name in (model, baseline))
        yield Finding.of(
            "moving sinks are not observed in ARMs (4.2)",
            f"{NAMED[scale]}: {model} {one} moving, {baseline} {other}; difference "
            f"{apart(results, model, baseline, scale)}; {baseline}'s static patterns: "
            f"{share(results, baseline, 'static', scale)}",
            is_above(apart(results, model, baseline, scale), NO_DIFFERENCE),
            why="the DLM's share minus the AR model's is above 0",
            null=f"{baseline}'s mask with uniform attention: {uniform(results, baseline, scale)}",
        )  # fmt: skip


EXPERIMENT = recorded_runs.experiment(
    name="fig4-moving",
    shows="2510.15731, Figure 4",
    title="sinks that move between two steps",
    metric="share of (layer, head, prompt) patterns whose sink moves, on both scales; moves per pair of steps",
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
