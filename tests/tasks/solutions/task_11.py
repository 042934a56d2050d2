"""A detector of our own, in `find_sinks` and in a hook."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_sinks
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = ({"times": 2.0}, {"block": 16}, {"source": "previous"}, {"level": "layer"})


@dataclass(frozen=True)
class Alone(dl.sinks.Detector):
    """The largest score, if it is above `times` the second largest."""

    times: float = 1.5

    def thresholds(self, scores: torch.Tensor) -> torch.Tensor:
        best = scores.nan_to_num(-torch.inf).topk(2, -1).values
        top = scores >= best[..., :1]
        level = torch.where(top, self.times * best[..., 1:], self.times * best[..., :1])
        return level.masked_fill(scores.isnan(), torch.nan)


@functools.cache
def recorded(block: int) -> Any:
    return dl.record(toy(), PROMPTS[:4], [dl.ReceivedAttention()], gen_length=16, block_length=block, seed=0)


@functools.cache
def compared(times: float, block: int, source: Any) -> Any:
    hook = mask_sinks(Alone(times), source=source)
    return dl.compare(toy(), PROMPTS[:4], hooks=[hook], gen_length=16, block_length=block, seed=0)


def solve(times: float = 1.5, block: int = 8, source: Any = "current", level: Any = "head") -> dict[str, Any]:
    rec = recorded(block)
    mine, usual = (dl.find_sinks(rec, rule, level=level).is_sink for rule in (Alone(times), dl.AboveMean(3.0)))
    hidden = compared(times, block, source)
    maps = mine.any(-1).double()
    return {
        "share": maps.movedim(2, 0).flatten(1).mean(1).tolist(),
        "jaccard": float((mine & usual).sum() / (mine | usual).sum()),
        "changed": hidden.tokens_changed.tolist(),
    }
