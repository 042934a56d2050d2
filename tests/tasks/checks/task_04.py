"""Norms of values at sinks and elsewhere, in a float64 network."""

import functools
from typing import Any

import numpy as np

from tests.tasks.checks import comparing, loops


@functools.cache
def right() -> dict[str, list[Any]]:
    model = loops.loaded("toy")
    norms: dict[tuple[int, bool], list[float]] = {(layer, is_sink): [] for layer in range(4) for is_sink in (0, 1)}
    for text in loops.prompts()[:6]:
        for found in loops.passes64(model, loops.decode(model, text, 16, 8)[0][:16]):
            for layer in range(4):
                values = found[f"v{layer}"][0].numpy()  # [position, head, d_head]
                for head, pattern in enumerate(loops.pattern_of(found, layer)):
                    is_sink = loops.above_mean(loops.relative_scores(pattern))
                    for key, one in enumerate(is_sink):
                        norms[layer, one].append(float(np.sqrt((values[key, head] ** 2).sum())))
    return {
        "sinks": [len(norms[layer, True]) for layer in range(4)],
        "sink_norm": [float(np.mean(norms[layer, True])) for layer in range(4)],
        "other_norm": [float(np.mean(norms[layer, False])) for layer in range(4)],
    }


def check(answer: dict[str, Any]) -> list[str]:
    expected = dict(right())
    counts = {"sinks": [float(count) for count in expected.pop("sinks")]}
    return comparing.differences(answer, counts, 1.0) + comparing.differences(answer, expected, 0.0, 0.005)
