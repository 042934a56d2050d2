"""Section 7: how many sinks are at masked positions, and what a logit lens predicts there."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import per_prompt, record_prompts, rounded, sink_rule
from dlm_lens.experiments.attention_sinks.twin_networks import model_of
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

PLACES = ("prompt", "written", "masked")
GROUPS = ("sink", "other")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: shares of sinks and of keys per region; per layer, how often the lens is right."""
    import dlm_lens as dl
    from dlm_lens.probes import logit_lens

    found: dict[str, Any] = {"places": [], "lens": []}
    prompt_runs = record_prompts(item, settings, bench)
    for one in prompt_runs:
        paths = dl.trajectories(one.received["all"], sink_rule(settings))
        # A prompt without sinks has no line in the table.
        table = dl.sinks.position_enrichment(paths).set_index("class").reindex(list(PLACES))
        columns = [table[name].to_dict() for name in ("share", "base")]
        found["places"].append({place: rounded([float(column[place]) for column in columns]) for place in PLACES})
    sinks = dl.find_sinks(dl.received_of(prompt_runs[0].recording), sink_rule(settings))
    lens = logit_lens(model_of(item, settings, bench), prompt_runs[0].run, sinks, top=1).table()
    future = lens[lens["masked"].astype(bool) & lens["rank"].notna()]
    for row in range(len(prompt_runs)):
        mine = future[future["batch"] == row]
        found["lens"].append({
            group: [[int((part["rank"] == 0).sum()), round(float(part["entropy"].sum()), 3), len(part)]
                    for _, part in mine[mine["group"] == group].groupby("layer", sort=True)]
            for group in GROUPS
        })  # fmt: skip
    return found


def render(results: Results) -> Rendering:
    """Regions of sinks, and the lens at masked sinks and at masked controls."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    places: list[list[str]] = []
    read: list[list[str]] = []
    curves: dict[str, list[tuple[int, Interval]]] = {}
    for model in results.models:
        for place in PLACES:
            share, base = (_place(results, model, place, index) for index in (0, 1))
            places.append(
                [model, place, f"{share:.3f}", f"{base:.3f}", str(len(results.listed("places", model=model)))]
            )
        for group in GROUPS:
            points = [(layer, named(results, model, group, layer)) for layer in range(_layers(results, model))]
            curves[f"{model}, {'sinks' if group == 'sink' else 'controls'}"] = points
            for layer, right in points:
                n = sum(_readings(one, group, layer)[2] for one in results.listed("lens", model=model))
                read.append(
                    [model, group, str(layer), str(right), str(_entropy(results, model, group, layer)), str(n)]
                )
    tables = [
        Table("where sinks are, and where a random key of the same step is", ["model", "place", "sinks", "keys",
              "n prompts"], places),
        Table("at masked positions: the logit lens after a layer predicts the token of the finished answer; "
              "controls are masked positions of the same step that are not sinks; 95% intervals over prompts",
              ["model", "position", "layer", "predicts the final token", "entropy in nats", "n readings"], read),
    ]  # fmt: skip
    figure = line_chart(curves, x="layer", y="lens predicts the final token")
    return Rendering(tables, {"lens": figure}, list(_findings(results)))


def named(results: Results, model: str, group: str, layer: int) -> Interval:
    """How often the lens's first token is the final token, at masked positions of a group."""
    return per_prompt(results, model, ["lens"], lambda one: _readings(one, group, layer)[::2], bounds=(0, 1))


def _entropy(results: Results, model: str, group: str, layer: int) -> Interval:
    return per_prompt(results, model, ["lens"], lambda one: _readings(one, group, layer)[1:], bounds=(0, math.inf))


def _readings(one: Mapping[str, Any], group: str, layer: int) -> tuple[float, float, float]:
    """Of a prompt: right readings, the sum of their entropies, their number."""
    right, entropy, count = one[group][layer] if layer < len(one[group]) else (0, 0.0, 0)
    return right, entropy, count


def _layers(results: Results, model: str) -> int:
    return max(len(one[group]) for one in results.listed("lens", model=model) for group in GROUPS)


def share_on_masks(results: Results, model: str) -> tuple[float, float]:
    """Share of the sinks on masked positions, and share of the keys that are masked positions."""
    return _place(results, model, "masked", 0), _place(results, model, "masked", 1)


def more_on_masks(results: Results, model: str) -> Interval:
    """Share of the sinks on masked positions minus their share of the keys, paired by prompt."""

    def terms(places: dict[str, list[float | None]]) -> tuple[float, float]:
        share, base = places["masked"]
        return (0.0, 0.0) if share is None or base is None else (share - base, 1.0)

    return per_prompt(results, model, ["places"], terms, bounds=(-1, 1))


def _place(results: Results, model: str, place: str, index: int) -> float:
    """Mean over prompts."""
    values = [one[place][index] for one in results.listed("places", model=model) if one[place][index] is not None]
    return float(sum(values) / max(1, len(values)))


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        (share, base), more = share_on_masks(results, model), more_on_masks(results, model)
        yield Finding.of(
            'moving sinks "often appear in the future relative to the current generation step" (5.3)',
            f"{model}: {share:.3f} of the sinks are on masked positions, which are {base:.3f} of the keys: "
            f"{more} more",
            is_above(more, 0),
            why="agreement: more often than a random key of the same step",
            null=f"a random key: {base:.3f}",
        )
        # After the last layer the lens is the model's own output.
        last = _layers(results, model) - 2
        if last >= 0:
            yield Finding(
                "what future sinks store is an open question (7)",
                f"{model}: after layer {last} the lens predicts the final token at "
                f"{named(results, model, 'sink', last)} "
                f"of the masked sinks, and at {named(results, model, 'other', last)} of the controls",
                "no counterpart",
            )


EXPERIMENT = recorded_runs.experiment(
    name="beyond-future",
    shows="2510.15731, Sections 5.3 and 7",
    title="sinks at future positions, and what a logit lens reads there",
    metric="share of sinks on masked positions; how often the lens predicts the final token",
    small={"models": ["toy"], "eps": 2.0},
    full={"models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B"]},
    run=run,
    render=render,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
