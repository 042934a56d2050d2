"""Layers with sliding windows: the random key of a comparison is one that the layer sees."""

from collections.abc import Callable

import pandas as pd
import pytest

import dlm_lens as dl
from dlm_lens.sinks import (
    Trajectories,
    frontier_alignment,
    position_enrichment,
    sink_consistency,
    token_enrichment,
)
from dlm_lens.testing import tiny

PROMPTS = [
    [5, 9, 13, 2, 7, 30, 31, 22, 24, 25, 26, 27, 28],
    [35, 39, 33, 12, 17, 20, 21, 2, 4, 5, 6, 7, 8],
]
COMPARISONS: dict[str, Callable[[Trajectories], pd.DataFrame]] = {
    "tokens": lambda paths: token_enrichment(paths, by="layer"),
    "positions": lambda paths: position_enrichment(paths, by="layer"),
    "frontier": lambda paths: frontier_alignment(paths, by="layer"),
    "consistency": lambda paths: sink_consistency(paths),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_chance_of_a_layer_does_not_depend_on_the_others(name: str) -> None:
    model = tiny("diffusion_gemma")
    run = dl.denoise(model, PROMPTS, gen_length=24, steps_per_block=5, seed=3)
    windows = []
    for layers in (None, [0], [2]):
        rec = dl.recording.rerun(model, run, [dl.ReceivedAttention(min_viewers=1)], layers=layers)
        windows.append(dl.trajectories(rec, dl.AboveMean(eps=1.0)))
    together, *alone = (COMPARISONS[name](paths) for paths in windows)
    keys = [paths.scored.sum().item() for paths in windows]
    assert keys[1] < keys[2] == keys[0]  # layer 0 has a window, layer 2 sees everything
    for layer, table in zip((0, 2), alone, strict=True):
        part = together[together["layer"] == layer].reset_index(drop=True)
        pd.testing.assert_frame_equal(part, table.reset_index(drop=True))
