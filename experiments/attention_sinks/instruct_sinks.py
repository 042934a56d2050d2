"""Sinks of a base and an instruct model: each model's own, and the overlap of their positions."""

import math
from collections.abc import Mapping
from typing import Any

from dlm_lens.experiments.attention_sinks.recorded_runs import record_prompts, rounded, sink_rule
from dlm_lens.experiments.results import Item, Settings

MEASURES: dict[str, tuple[str, str]] = {
    "sinks per map": ("sinks", "maps"),
    "maps with a sink": ("with_sink", "maps"),
    "moves per 100 pairs of steps": ("moves", "pairs"),
    "patterns whose sink moves": ("moving", "patterns"),
    "static, of the patterns with a sink": ("static", "settled"),
    "drift of the main sink, positions per step": ("drift", "drifting"),
}
"""Ratios of two counts per prompt. A map is one head at one step; a pattern is one head over the run."""

BOUNDS: dict[str, tuple[float, float] | None] = {
    "sinks per map": (0, math.inf),
    "moves per 100 pairs of steps": (0, math.inf),
    "drift of the main sink, positions per step": None,
}
"""Of the measures that are no shares: the smallest and largest possible value."""

OVERLAPS: dict[str, str] = {
    "own": "each model's own run",
    "same": "both on the base model's canvases",
    "other head": "the same, against the next head of the layer (chance)",
}


def compare(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: the measures of both models, the token classes of their sinks, and the overlap of the positions.

    Raises:
        ValueError: the models encode the prompts differently, so that their positions do not correspond.
    """
    import dlm_lens as dl

    base, instruct = (_own(name, item, settings, bench) for name in (item["base"], item["instruct"]))
    _check(item, base, instruct)
    model = bench.model(item["instruct"])
    shared = dl.find_sinks(dl.received_over_steps(model, base["run"]), sink_rule(settings)).is_sink
    pairs = {
        "own": (base["is_sink"], instruct["is_sink"]),
        "same": (base["is_sink"], shared),
        "other head": (base["is_sink"], shared.roll(1, 3)),
    }
    return {
        "base": base["rows"],
        "instruct": instruct["rows"],
        "overlap": [{name: overlap(one[:, row], two[:, row]) for name, (one, two) in pairs.items()}
                    for row in range(len(base["rows"]))],
    }  # fmt: skip


def _own(name: str, item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """A model's run on the item's prompts: measures per prompt, and all its sinks on the CPU."""
    import torch

    import dlm_lens as dl

    prompt_runs = record_prompts({"model": name, "start": item["start"]}, settings, bench)
    sinks = [dl.find_sinks(one.received["all"], sink_rule(settings)).is_sink for one in prompt_runs]
    return {
        "run": prompt_runs[0].run,
        "is_sink": torch.cat(sinks, 1),
        "rows": [_measured(one.received["all"], settings) for one in prompt_runs],
    }


def _measured(received: Any, settings: Settings) -> dict[str, Any]:
    """The counts of one prompt, and the share of each token class among its sinks and among its keys."""
    import dlm_lens as dl

    sinks = dl.find_sinks(received, sink_rule(settings))
    paths = dl.trajectories(received, sink_rule(settings))
    kinds, measures = paths.kinds.flatten().tolist(), paths.measures
    tokens = dl.sinks.token_enrichment(paths).set_index("class")
    defined = (~sinks.scores.isnan()).any(-1)
    return {
        "sinks": int(sinks.is_sink.sum()),
        "with_sink": int(sinks.is_sink.any(-1).sum()),
        "maps": int(defined.sum()),
        "moves": 100 * int((paths.before >= 0).sum()),
        "pairs": int((paths.defined.sum(0) - 1).clamp(min=0).sum()),
        "moving": kinds.count("moving"),
        "patterns": len(kinds),
        "static": kinds.count("static"),
        "settled": len(kinds) - kinds.count("none"),
        "drift": rounded(float(measures["drift"].sum())),
        "drifting": int(measures["drift"].count()),
        "kinds": {
            str(name): rounded([float(line["share"]), float(line["base"])]) for name, line in tokens.iterrows()
        },
    }


def overlap(one: Any, two: Any) -> list[int]:
    """Counts: sinks of both models, of either model; maps where both have sinks, maps where these are equal."""
    both_have = one.any(-1) & two.any(-1)
    equal = (one == two).all(-1) & both_have
    return [int((one & two).sum()), int((one | two).sum()), int(both_have.sum()), int(equal.sum())]


def _check(item: Item, base: Any, instruct: Any) -> None:
    one, two = base["run"].canvases, instruct["run"].canvases
    same = one.shape == two.shape and one[0].equal(two[0])
    if not same or base["is_sink"].shape != instruct["is_sink"].shape:
        shapes = " and ".join(str(list(found["is_sink"].shape)) for found in (base, instruct))
        raise ValueError(
            f"{item['base']} and {item['instruct']} do not share positions, layers and heads (sinks of shape "
            f"{shapes}, or other token ids); give a base and an instruct DLM of one architecture and tokenizer, "
            "and one sampler (--set 'sampler={...}')"
        )


def ratio(row: Mapping[str, Any], measure: str) -> float | None:
    """A measure of one prompt; None where its denominator is 0."""
    top, bottom = MEASURES[measure]
    return row[top] / row[bottom] if row[bottom] else None
