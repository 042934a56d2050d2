"""Which scores of a recording the page holds exactly, and from which threshold on these include every sink."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.viz.reporting.packing import Pack, narrow, packed

MARGIN = 1e-3
"""Amount by which limits are rounded up: far above float32 rounding, below a step of the slider."""

ROUNDING = 2**-22
"""A relative bound of the float32 rounding of a score or a threshold."""


@dataclass(frozen=True, eq=False)
class Precision:
    """Which scores are exact, and how fine the colour bins of the others are.

    Args:
        strongest: number of strongest keys of every pattern that are exact; 0 for all keys.
        eps: every key that is a sink by `AboveMean(eps)` is exact too.
        colours: colour bins per factor of 2 above uniform attention; 0 for one per factor of 2 and none below
            uniform attention; -1 for one per factor of 4 and none below twice uniform attention.
    """

    strongest: int
    eps: float = math.inf
    colours: int = 2


PRECISIONS = (
    Precision(0),
    Precision(24, 0.5),
    Precision(16, 0.5),
    Precision(12, 1.0),
    Precision(8, 1.0),
    Precision(8, 1.5),
    Precision(8, 2.0),
    Precision(8, 2.0, 1),
    Precision(6, 2.0, 1),
    Precision(4, 3.0, 1),
    Precision(4, 3.0, 0),
    Precision(3, 3.0, 0),
    Precision(2, colours=0),
    Precision(1, colours=0),
    Precision(1, colours=-1),
)


class Scores:
    """The scores [pattern, step, key] of one row, NaN where undefined, and the arrays that a page needs."""

    def __init__(self, values: Float[Tensor, "pattern step key"], pack: Pack = packed) -> None:
        self.values, self.pack = values.float().contiguous(), pack

    @cached_property
    def defined(self) -> Float[Tensor, "pattern step"]:
        """Number of keys with a score."""
        return (~self.values.isnan()).sum(-1)

    @cached_property
    def order(self) -> Float[Tensor, "pattern step key"]:
        """The keys, highest score first; of equals the earlier one, as `TopK` ranks them."""
        return self.values.nan_to_num(nan=-torch.inf).argsort(dim=-1, descending=True, stable=True)

    @cached_property
    def ranked(self) -> Float[Tensor, "pattern step key"]:
        """The scores in the order of `order`."""
        return self.values.gather(-1, self.order)

    @cached_property
    def total(self) -> Float[Tensor, "pattern step"]:
        """Sum of the scores, in float64 as the detectors take it."""
        return self.values.double().nan_to_num_(nan=0.0).sum(-1)

    @cached_property
    def std(self) -> Float[Tensor, "pattern step"]:
        """Their standard deviation (population), in float64 as `AboveStd` takes it."""
        mean = (self.total / self.defined)[..., None]
        off = self.values.double().nan_to_num_(nan=0.0).sub_(mean).masked_fill_(self.values.isnan(), 0.0)
        return (off.square_().sum(-1) / self.defined).sqrt()

    @cached_property
    def above_others(self) -> Float[Tensor, "pattern step key"]:
        """Score minus mean of the others, in the order of `order`; above eps for sinks of `AboveMean(eps)`."""
        wide = self.ranked.double()
        return wide - (self.total[..., None] - wide) / (self.defined[..., None] - 1)

    @property
    def highest(self) -> float:
        """The highest score; 1 if there is none."""
        return max(1.0, float(self.ranked[..., 0].nan_to_num(nan=0.0).max()))

    def kept(self, precision: Precision) -> Float[Tensor, "pattern step"]:
        """Number of keys of every pattern and step that are exact."""
        if precision.strongest == 0:
            return self.defined
        # A little more than the sinks of the rule, so that the limit, rounded up, does not exceed eps.
        passing = (self.above_others > precision.eps - 2 * MARGIN).sum(-1)
        return passing.clamp(min=precision.strongest).minimum(self.defined)

    def limits(self, kept: Float[Tensor, "pattern step"]) -> dict[str, float | None]:
        """Per rule, the setting from which on all sinks are among the exact keys; None for any setting."""
        left = kept < self.defined
        if not bool(left.any()):
            return {"above-mean": None, "above-std": None, "top-k": None}
        first = kept.clamp(max=self.values.shape[-1] - 1)[..., None]
        next_one = self.ranked.gather(-1, first)[..., 0].double()
        mean, lead = self.total / self.defined, self.above_others.gather(-1, first)[..., 0]
        # Where scores do not differ, nothing is a sink; the limit must not grow by a division by a negligible std.
        spread = (next_one * (1 + ROUNDING) - mean) / self.std.clamp(min=1e-12)
        spread = spread.masked_fill(self.std <= 1e-6 * mean.abs(), -torch.inf)
        return {
            "above-mean": _up(float(lead[left].max())),
            "above-std": _up(float(spread[left].max())),
            "top-k": float(kept[left].min()),
        }

    @cached_property
    def halves(self) -> bool:
        """Whether float16 holds all scores exactly, as for a recording stored in half precision."""
        return bool(((self.values.half().float() == self.values) | self.values.isnan()).all())

    def strongest(self, kept: Float[Tensor, "pattern step"]) -> dict[str, Any]:
        """The exact keys and their scores, pattern by pattern and in each step by step."""
        chosen: Bool[Tensor, "pattern step key"] = torch.arange(self.values.shape[-1]) < kept[..., None]
        keys = self.order[chosen].numpy()
        scores = self.ranked[chosen].numpy()
        return {
            "count": self.pack(narrow(kept.numpy(), self.values.shape[-1])),
            "key": self.pack(narrow(keys, self.values.shape[-1])),
            "score": self.pack(scores.astype(np.float16) if self.halves else scores),
        }

    def statistics(self) -> dict[str, Any]:
        """Number, sum and standard deviation of the scores per pattern and step, which thresholds need."""
        keys = self.values.shape[-1]
        return {
            "defined": self.pack(narrow(self.defined.numpy(), keys)),
            "total": self.pack(self.total.numpy()),
            "std": self.pack(self.std.nan_to_num(nan=0.0).numpy()),
        }

    def edges(self, colours: int) -> list[float]:
        """Borders of the colour bins, up to the highest score."""
        if colours < 0:
            return [2.0 * 4**i for i in range(math.ceil(max(0.0, math.log2(self.highest) - 1) / 2) + 1)]
        above = [
            2 ** (i / max(1, colours)) for i in range(math.ceil(math.log2(self.highest) * max(1, colours)) + 1)
        ]
        return ([0.25, 0.5] if colours > 1 else [0.5] if colours else []) + above

    def bins(self, colours: int) -> dict[str, Any]:
        """The bin of every score, [pattern, key, step]: 0 where undefined, else 1 + the number of borders below it.

        Steps are the last axis, since scores of a key change little from step to step, which compresses well.
        """
        edges = torch.tensor(self.edges(colours))
        codes = torch.bucketize(self.values, edges, right=True).add_(1).masked_fill_(self.values.isnan(), 0)
        return self.pack(codes.to(torch.uint8).transpose(1, 2).numpy())


def _up(limit: float) -> float:
    return math.ceil((limit + MARGIN) * 1000) / 1000
