"""Received attention of the block's queries."""

from typing import Any

import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.testing import tiny

PROMPTS = ["w3 w9 w21 w4 w17 w30 w8 w12", "w5 w50 w2 w33 w41 w7 w19 w26", "w11 w6 w44 w1 w39 w28 w15 w3"]
WRONG: tuple[dict[str, Any], ...] = ({"queries": "all"}, {"share": 0.5}, {"seed": 0}, {"prompt_only": True})


def solve(queries: Any = "block", share: float = 0.25, seed: int = 3, prompt_only: bool = False) -> dict[str, Any]:
    model = tiny("sdar", seed=seed)
    rec = dl.record(
        model,
        PROMPTS,
        [dl.ReceivedAttention(("block", queries) if queries != "block" else "block", min_viewers=1)],
        gen_length=12,
        block_length=4,
        temperature=0.0,
        seed=0,
    )
    sums = rec.received_sums(queries).double().nan_to_num()  # [step, batch, layer, head, key]
    rows = rec.run.row_steps
    shares, largest = [], []
    for step, (start, _) in enumerate(rec.run.spans):
        for row in range(len(PROMPTS)):
            if step < rows[row] and bool(rec.run.unmasked[step, row].any()):
                received, before = sums[step, row], 8 if prompt_only else start
                shares.append(received[..., :before].sum(-1) / received.sum(-1))
                largest.append((received.argmax(-1) < before).double())
    early = probes.early_attention(rec, share=share)
    return {
        "prefix_share": torch.stack(shares).mean((0, 2)).tolist(),
        "largest_in_prefix": torch.stack(largest).mean((0, 2)).tolist(),
        "recall": early.mean("recall").value,
        "chance": float(early.chance[:, 0].sum() / early.chance[:, 1].sum()),
    }
