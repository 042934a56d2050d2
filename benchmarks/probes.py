"""The numbers of docs/probes.md: every probe on the embedded models. `python -m benchmarks.probes`."""

import logging
from typing import Any

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.statistics import Estimate

RULE = dl.AboveMean(3.0)
PEOPLE, THINGS = ["tom", "mia", "ben", "anna"] * 2, ["apples", "eggs", "books", "cups"] * 2
NUMBERS = zip([5, 9, 3, 7, 8, 2, 6, 4], [4, 2, 6, 1, 3, 7, 2, 5], strict=True)
PROMPTS = [
    f"{person} has {a} {thing} . {person} buys {b} more . how many {thing} ? :"
    for person, thing, (a, b) in zip(PEOPLE, THINGS, NUMBERS, strict=True)
]


def main() -> None:
    """Print one line per model and question."""
    logging.disable(logging.WARNING)
    print("| model | sinks | ratio of norms | sink shorter | layer: update / stream, attending over others |")
    print("|---|---|---|---|---|")
    runs = {name: recorded(name) for name in ("toy", "toy-sink", "toy-gated", "toy-ar")}
    for name, (model, rec, sinks) in runs.items():
        norms = probes.value_norms(rec, sinks, match="any" if name == "toy-ar" else "masked")
        updates = probes.sink_updates(model, rec.run, sinks, attends=0.3).table().query("measure == 'relative'")
        relative = [
            f"{layer}: {ratio:.2f}"
            for layer, ratio, queries in zip(updates["layer"], updates["ratio"], updates["queries"], strict=True)
            if queries
        ]
        line = (norms.found, norms.ratio, norms.shorter, ", ".join(relative) or "no such queries")
        print(f"| {name} | {' | '.join(map(str, line))} |")
    print(
        "\n| model | masked sinks | found in layer 1, sinks | others | in layer 2, sinks | others |\n|" + "---|" * 6
    )
    dlms = [name for name in runs if name != "toy-ar"]
    for name in dlms:
        model, rec, sinks = runs[name]
        lines: Any = probes.logit_lens(model, rec.run, sinks).summary()
        lines = lines[lines["class"] == "masked"].set_index(["layer", "group"])
        cells = [
            _cell(lines.loc[place], "found") for place in ((1, "sink"), (1, "other"), (2, "sink"), (2, "other"))
        ]
        print(f"| {name} | {lines.loc[(1, 'sink'), 'entries']} | {' | '.join(cells)} |")
    print("\n| model | confidence: beyond control | steps later: beyond control | tokens changed |\n|" + "---|" * 4)
    for name in dlms:
        found = probes.sink_mechanism(runs[name][0], PROMPTS, RULE, steps=16, gen_length=16, controls=(0, 1))
        lines = found.table().query("masked == 'sinks'").set_index("measure")
        changed, control = found.tokens_changed.mean(1).tolist()
        cells = [_cell(lines.loc[measure], "beyond") for measure in ("confidence", "steps later")]
        print(f"| {name} | {' | '.join(cells)} | {changed:.2f} (random {control:.2f}) of 16 |")
    print("\n| model | sink stays: cosine | changes (pairs) | comes or goes | none |\n|" + "---|" * 5)
    for name in dlms:
        model, rec, _ = runs[name]
        lines = probes.pattern_stability(model, rec.run, RULE).by_change().set_index("sink")
        cells = [_cell(lines.loc[kind], "cosine") for kind in ("stays", "changes", "comes or goes", "none")]
        cells[1] += f" ({lines.loc['changes', 'pairs']})"
        print(f"| {name} | {' | '.join(cells)} |")


def recorded(name: str) -> tuple[Any, Any, Any]:
    """The model, its recording and its sinks."""
    model = dl.load(name)
    steps: dict[str, Any] = {} if name == "toy-ar" else {"steps": 16}
    rec = dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], gen_length=16, **steps)
    return model, rec, dl.find_sinks(rec, RULE)


def _cell(line: Any, name: str) -> str:
    return str(Estimate(line[name], line[f"{name}_low"], line[f"{name}_high"], 0))


if __name__ == "__main__":
    main()
