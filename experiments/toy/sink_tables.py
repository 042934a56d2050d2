"""The tables on attention sinks in the model cards."""

from collections.abc import Mapping
from typing import Any

from experiments.toy.phenomena import CLASSES
from experiments.toy.statistics import interval, markdown_table

Result = Mapping[str, Any]

MEASURES = {
    "maps with a sink": "maps_with_a_sink",
    "sinks per map": "sinks_per_map",
    "keys that are no sink": "tokens_filtered_out",
    "main sink differs, first to last step": "main_sink_differs_first_to_last",
    "the same, among keys with a score at the first step": "main_sink_differs_same_keys",
    "the same, by raw column sum": "main_sink_differs_by_column_sum",
    "the same, where it passes eps in both": "main_sink_differs_where_both_pass",
    "main sink changes from one step to the next": "main_sink_changes_per_step",
    "distinct main sinks over all steps": "main_sink_distinct_positions",
}
NORMS = {
    "value norm, sinks": "sinks",
    "value norm, other keys": "others",
    "value norm, sinks / others in the same map": "ratio_within_map",
}


def all_models(compared: Mapping[str, Result]) -> str:
    """What the sinks of every measured run do, side by side."""
    found = {label: result["phenomena"] for label, result in compared.items()}
    first = next(iter(found.values()))
    rows = [
        [title, *(f"{interval(p[key], 3)}, n {p[key]['n']:,}" for p in found.values())]
        for title, key in MEASURES.items()
    ]
    rows += [
        [
            title,
            *(f"{interval(p['value_norm'][key])}, n {p['value_norm'][key]['n']:,}" for p in found.values()),
        ]
        for title, key in NORMS.items()
    ]
    return (
        f"Scale: received attention relative to uniform attention, per head; a sink is a key above the "
        f"mean of the others + {first['eps']:g}. In a full bidirectional pass that is the column sum. In the "
        f"causal baseline it is the column sum divided by the sum of 1/(i + 1) over its viewers i >= j; keys "
        f"with fewer than 8 viewers have no score, and a step sees the prefix only. {first['prompts']} test "
        f"prompts of task A, every step; a map is one (prompt, step, layer, head). Intervals: 95%, bootstrap "
        f"over prompts.\n\n"
        + markdown_table(["", *found], rows)
        + "\n\nToken classes among the sinks; in parentheses, among all keys that have a score:\n\n"
        + markdown_table(["class", *found], _classes(found))
    )


def _classes(found: Mapping[str, Result]) -> list[list[str]]:
    return [
        [
            name,
            *(
                f"{interval(p['classes'][name]['sinks'])} ({p['classes'][name]['base_rate']['value']:.2f})"
                for p in found.values()
            ),
        ]
        for name in CLASSES
        if any(p["classes"][name]["base_rate"]["value"] > 0 for p in found.values())
    ]


def learned(result: Result) -> list[str]:
    """The section on a model's learned sink token; empty for a model that has none."""
    found = result["phenomena"].get("learned_sink")
    if found is None:
        return []
    rows = [
        [str(layer), interval(share, 3), interval(main, 3), interval(norm), interval(others)]
        for layer, (share, main, norm, others) in enumerate(
            zip(found["share"], found["is_main"], found["value_norm"], found["value_norm_others"], strict=True)
        )
    ]
    head = [
        "layer",
        "share of all attention",
        "maps whose main sink it is",
        "its value norm",
        "other keys' value norm",
    ]
    whole, exempt = result["phenomena"]["main_sink_differs_first_to_last"], found["main_sink_differs_exempted"]
    n = found["share"][0]["n"]
    text = (
        f"Per layer, over {n:,} maps, with 95% intervals (bootstrap over prompts):\n\n"
        f"{markdown_table(head, rows)}\n\n"
        f"The main sink differs between the first and the last step in {interval(whole, 3)} of the (prompt, layer, "
        f"head); with the learned sink exempted, so that the main sink is a key of the canvas, in "
        f"{interval(exempt, 3)} (n {exempt['n']:,} each)."
    )
    return ["## The learned sink token\n\n" + text]
