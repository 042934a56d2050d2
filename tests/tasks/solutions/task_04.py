"""Recorded value norms beside recorded sinks."""

import functools
from typing import Any

import dlm_lens as dl
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = ({"level": "layer"}, {"eps": 2.0}, {"keys": True}, {"prompts": 5})


@functools.cache
def recorded(keys: bool, prompts: int) -> Any:
    reducer = dl.recording.KeyNorm() if keys else dl.ValueNorm()
    return dl.record(
        toy(), PROMPTS[:prompts], [dl.ReceivedAttention(), reducer], gen_length=16, block_length=8, seed=0
    )


def solve(level: Any = "head", eps: float = 3.0, keys: bool = False, prompts: int = 6) -> dict[str, Any]:
    rec = recorded(keys, prompts)
    sinks = dl.find_sinks(rec, dl.AboveMean(eps), level=level)
    norms = (rec.key_norm if keys else rec.value_norm).double()  # [step, batch, layer, kv_head, key]
    is_sink = sinks.is_sink if level == "head" else sinks.is_sink[:, :, :, None].expand(norms.shape)
    answer: dict[str, Any] = {"sinks": [], "sink_norm": [], "other_norm": []}
    for layer in range(4):
        here, chosen = norms[:, :, layer], is_sink[:, :, layer]
        answer["sinks"].append(int(chosen.sum()))
        answer["sink_norm"].append(float(here[chosen].mean()))
        answer["other_norm"].append(float(here[~chosen & here.isfinite()].mean()))
    return answer
