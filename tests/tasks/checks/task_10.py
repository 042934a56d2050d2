"""Shares of maps with a sink on two scales, and the files of the recordings."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.tasks.checks import comparing, loops

LENGTH, BATCH = 12, 4


@functools.cache
def right() -> dict[str, dict[str, float]]:
    found = {}
    for name in ("toy", "toy-ar"):
        causal = name == "toy-ar"
        maps: dict[str, list[bool]] = {"relative": [], "column_sums": []}
        for text in loops.prompts():
            for layers in patterns_of(name, text):
                for pattern in (pattern for heads in layers for pattern in heads):
                    relative = loops.relative_scores(pattern, causal)
                    sums = loops.column_sums(pattern) if causal else pattern.sum(0)
                    maps["relative"].append(any(loops.above_mean(relative)))
                    maps["column_sums"].append(any(loops.above_mean(sums)))
        found[name] = {scale: float(np.mean(has)) for scale, has in maps.items()}
    return found


def check(answer: dict[str, Any]) -> list[str]:
    wrong = comparing.differences(answer, right(), 0.002)
    wrong += comparing.differences(answer, {"left": 16}, 0.0)
    places = answer.get("directories")
    if not isinstance(places, dict) or set(places) != {"toy", "toy-ar"}:
        return [*wrong, "directories must name those of toy and of toy-ar"]
    return wrong + [line for name, place in places.items() for line in recording(name, Path(str(place)))]


def recording(name: str, place: Path) -> list[str]:
    """What is wrong with the files of a recording."""
    shards = sorted(path for path in place.rglob("*.safetensors") if re.search(r"step-\d+", path.name))
    wanted = LENGTH * len(loops.prompts()) // BATCH
    if len(shards) != wanted:
        return [f"{place} holds {len(shards)} finished steps of batches of {BATCH}; {wanted} are needed"]
    keys = max(size for shard in shards[:1] for array in load_file(shard).values() for size in array.shape)
    for shard in shards:
        for title, array in load_file(shard).items():
            if sum(size >= min(keys, 24) for size in array.shape) > 1:
                return [
                    f"{shard} stores {title} of shape {list(array.shape)}, which has a number per query and key"
                ]
    return received(name, shards[:LENGTH])


def received(name: str, shards: list[Path]) -> list[str]:
    """Whether the received attention of prompt 0, which has no padding on its left, is right at every step."""
    for shard, scores in zip(shards, first_scores(name), strict=True):
        stored = load_file(shard).get("array.received")
        if stored is None:
            return [f"{shard} holds no received attention"]
        known = stored[0, :, :, : scores.shape[-1]]
        if not np.allclose(known, scores, rtol=2e-3, atol=1e-3, equal_nan=True):
            return [f"{shard} does not hold the received attention of prompt 0"]
    return []


@functools.cache
def first_scores(name: str) -> list[loops.Floats]:
    """The received attention of prompt 0 at every step, [layer, head, key]."""
    causal = name == "toy-ar"
    steps = patterns_of(name, loops.prompts()[0])
    return [
        np.array([[loops.relative_scores(head, causal) for head in heads] for heads in layers]) for layers in steps
    ]


@functools.cache
def patterns_of(name: str, text: str) -> list[list[loops.Floats]]:
    """The patterns of every step: per layer [head, query, key]."""
    model = loops.loaded(name)
    if name == "toy":
        steps = loops.passes64(model, loops.decode(model, text, LENGTH, LENGTH)[0][:LENGTH])
        return [[loops.pattern_of(found, layer) for layer in range(4)] for found in steps]
    # The pattern of a causal model's first tokens is a part of that of all: one pass for all steps.
    prefixes = loops.greedy(model, text, LENGTH)
    whole = loops.pass64(model, prefixes[-1], causal=True)
    sizes = [prefix.shape[1] for prefix in prefixes]
    return [[loops.pattern_of(whole, layer)[:, :size, :size] for layer in range(4)] for size in sizes]
