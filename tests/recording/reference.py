"""Reducers and runs that tests share, and their statistics from float64 patterns: row by row, with loops."""

import math

import torch

from dlm_lens.recording import (
    AttentionEntropy,
    KeyNorm,
    MassiveActivations,
    ReceivedAttention,
    RegionMass,
    ResidualNorm,
    TopKeys,
    UpdateNorm,
    ValueNorm,
    WeightedValue,
)
from tests.reference import forward64

FAMILIES = [
    "llada",
    "mmada",
    "dream",
    "diffugpt",
    "smdm",
    "a2d_qwen3",
    "sink front",
    "sink end",
    "sumi",
    "llama",
    "qwen2",
]
PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40]]


def build(tiny, family):
    if family.startswith("sink"):
        return tiny("sink_qwen", num_sinks=2, sink_placement=family.split()[1])
    if family == "a2d_qwen3":
        return tiny(family, head_dim=8)
    return tiny("causal", model_type=family) if family in ("llama", "qwen2") else tiny(family)


def settings(family, **more):
    if family in ("llama", "qwen2"):
        return {"gen_length": 12, "temperature": 1.0, "seed": [3, 4], **more}
    return {"steps": 6, "gen_length": 12, "temperature": 0.5, "seed": [3, 4], **more}


def alone(model, run, step, row):
    """The canvas that one row saw, its masks, and everything that a float64 forward of it computes."""
    keep = run.attention_mask[row].clone()
    causal = bool(getattr(model.config, "is_causal", True))
    if causal:
        keep &= ~run.masked[step, row]
    ids, masked = run.canvases[step, row][keep], run.masked[step, row][keep]
    count = getattr(model.config, "num_sinks", 0)
    front = getattr(model.config, "sink_placement", "front") == "front"
    kept = forward64(model, ids[None], causal=causal)
    length = len(ids)
    canvas = list(range(count, count + length)) if front and count else list(range(length))
    sinks = list(range(count)) if front else list(range(length, length + count))
    return keep, masked, kept, canvas, canvas + sinks, causal


def output_matrix(model, layer):
    """W_O of a layer as [d_model, head x d_head]."""
    weights = model.state_dict()
    if "transformer.wte.weight" in weights:  # GPT-2's is stored the other way around
        return weights[f"transformer.h.{layer}.attn.c_proj.weight"].double().T
    return weights[f"model.layers.{layer}.self_attn.o_proj.weight"].double()


def received(pattern, queries, causal, min_viewers=8):
    """[query][key] and which queries count -> relative scores and the raw column sums."""
    keys = len(pattern[0])
    scores, sums = [], []
    for j in range(keys):
        total, even, seen = 0.0, 0.0, 0
        for i, counts in enumerate(queries):
            if counts and (not causal or j <= i):
                total += pattern[i][j]
                even += 1 / (i + 1 if causal else keys)
                seen += 1
        scores.append(total / even if seen >= min_viewers else math.nan)
        sums.append(total)
    return torch.tensor(scores), torch.tensor(sums, dtype=torch.float64)


def classes(run, step, row, keep, masked):
    start, stop = run.spans[step]
    positions = torch.arange(len(keep))[keep]
    answer = run.masked[0, row][keep]
    return {
        "all": torch.ones_like(masked).tolist(),
        "masked": masked.tolist(),
        "unmasked": (~masked).tolist(),
        "prompt": (~answer).tolist(),
        "block": ((positions >= start) & (positions < stop)).tolist(),
    }


EVERYTHING = (
    ReceivedAttention(("all", "unmasked", "prompt", "block")),
    ValueNorm("both"),
    KeyNorm("both"),
    WeightedValue(),
    ResidualNorm(),
    MassiveActivations(),
    AttentionEntropy(),
    RegionMass(),
    UpdateNorm(),
    TopKeys(2),
)
"""A reducer of every kind."""

RUN = {"steps": 6, "gen_length": 12, "temperature": 0.7, "seed": [3, 4]}


def equal(found, wanted):
    """Recordings of the same numbers, bit by bit."""
    for name in wanted.specs:
        a, b = getattr(found, name), getattr(wanted, name)
        assert a.shape == b.shape, name
        assert torch.equal(torch.nan_to_num(a, -7), torch.nan_to_num(b, -7)), name
