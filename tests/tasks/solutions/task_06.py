"""Commitment of a batch of runs."""

from typing import Any

import dlm_lens as dl
from dlm_lens.probes import commitment
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = ({"block": 8}, {"bins": 15}, {"shift": 1}, {"count": 7})


def solve(block: int = 24, bins: int = 10, shift: int = 0, count: int = 8) -> dict[str, Any]:
    model = toy()
    run = dl.denoise(model, PROMPTS[:count], gen_length=24, block_length=block, seed=0)
    settled = commitment(model, run)
    lines = settled.calibration(bins).set_index("step").loc[[0 + shift, 8 + shift, 16 + shift]]
    return {
        "mean_lead": settled.mean_lead.value,
        "late": int((settled.committed_at > 0).sum()),
        "confidence": lines["confidence"].tolist(),
        "accuracy": lines["accuracy"].tolist(),
        "ece": lines["ece"].tolist(),
    }
