"""Commitment of a batch of runs."""

import functools
from typing import Any

import dlm_lens as dl
from dlm_lens.probes import commitment
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = ({"block": 8}, {"bins": 15}, {"shift": 1}, {"count": 7})


@functools.cache
def settled_in(block: int, count: int) -> Any:
    return commitment(toy(), dl.denoise(toy(), PROMPTS[:count], gen_length=24, block_length=block, seed=0))


def solve(block: int = 24, bins: int = 10, shift: int = 0, count: int = 8) -> dict[str, Any]:
    settled = settled_in(block, count)
    lines = settled.calibration(bins).set_index("step").loc[[0 + shift, 8 + shift, 16 + shift]]
    return {
        "mean_lead": settled.mean_lead.value,
        "late": int((settled.committed_at > 0).sum()),
        "confidence": lines["confidence"].tolist(),
        "accuracy": lines["accuracy"].tolist(),
        "ece": lines["ece"].tolist(),
    }
