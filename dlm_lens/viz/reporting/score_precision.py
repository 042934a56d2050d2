"""Which scores of a recording are in the page exactly, and from which threshold on that finds every sink."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.viz.reporting.packing import narrow, packed

MARGIN = 1e-3
"""Limits are rounded up by so much of a score: far more than float32 rounding, less than a slider's step."""

ROUNDING = 2**-22
"""More than what float32 rounding changes a score or a threshold by, as a part of it."""


@dataclass(frozen=True, eq=False)
class Rung:
    """How much of the scores is kept: a step of the ladder from everything to the strongest key alone.

    Args:
        strongest: so many keys of every pattern, exactly; 0 for all.
        eps: and every key that is a sink by `AboveMean(eps)`.
        colours: colour bins per factor of 2 above even attention; 0 for bins of the factors of 2 alone, without
            one below even attention.
    """

    strongest: int
    eps: float = math.inf
    colours: int = 2


LADDER = (
    Rung(0),
    Rung(24, 0.5),
    Rung(16, 0.5),
    Rung(12, 1.0),
    Rung(8, 1.0),
    Rung(8, 1.5),
    Rung(8, 2.0),
    Rung(8, 2.0, 1),
    Rung(6, 2.0, 1),
    Rung(4, 3.0, 1),
    Rung(4, 3.0, 0),
    Rung(3, 3.0, 0),
    Rung(2, colours=0),
    Rung(1, colours=0),
)


class Scores:
    """The scores [pattern, step, key] of one row, and what a page needs of them; NaN where undefined."""

    def __init__(self, values: Float[Tensor, "pattern step key"]) -> None:
        self.values = values.float().contiguous()

    @cached_property
    def defined(self) -> Float[Tensor, "pattern step"]:
        """How many keys have a score."""
        return (~self.values.isnan()).sum(-1)

    @cached_property
    def order(self) -> Float[Tensor, "pattern step key"]:
        """The keys, highest score first; of equals the earlier one, as `TopK` ranks them."""
        return self.values.nan_to_num(nan=-torch.inf).argsort(dim=-1, descending=True, stable=True)

    @cached_property
    def ranked(self) -> Float[Tensor, "pattern step key"]:
        """The scores in that order."""
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
        """Score minus the mean of the others, in that order: a sink of `AboveMean(eps)` has more than eps."""
        wide = self.ranked.double()
        return wide - (self.total[..., None] - wide) / (self.defined[..., None] - 1)

    @property
    def highest(self) -> float:
        """The highest score; 1 if there is none."""
        return max(1.0, float(self.ranked[..., 0].nan_to_num(nan=0.0).max()))

    def kept(self, rung: Rung) -> Float[Tensor, "pattern step"]:
        """How many keys of every pattern a rung keeps."""
        if rung.strongest == 0:
            return self.defined
        # A little more than the rule asks for, so that the limit, rounded up, is not above the rung's eps.
        passing = (self.above_others > rung.eps - 2 * MARGIN).sum(-1)
        return passing.clamp(min=rung.strongest).minimum(self.defined)

    def limits(self, kept: Float[Tensor, "pattern step"]) -> dict[str, float | None]:
        """From which setting on all sinks are among the kept keys, per rule; None where every setting will do."""
        left = kept < self.defined
        if not bool(left.any()):
            return {"above-mean": None, "above-std": None, "top-k": None}
        first = kept.clamp(max=self.values.shape[-1] - 1)[..., None]
        next_one = self.ranked.gather(-1, first)[..., 0].double()
        mean, lead = self.total / self.defined, self.above_others.gather(-1, first)[..., 0]
        # Where scores do not differ, nothing is a sink; a negligible spread must not blow the limit up.
        spread = (next_one * (1 + ROUNDING) - mean) / self.std.clamp(min=1e-12)
        spread = spread.masked_fill(self.std <= 1e-6 * mean.abs(), -torch.inf)
        return {
            "above-mean": _up(float(lead[left].max())),
            "above-std": _up(float(spread[left].max())),
            "top-k": float(kept[left].min()),
        }

    @cached_property
    def halves(self) -> bool:
        """Whether all scores are float16 numbers, as in a recording that is stored in half precision."""
        return bool(((self.values.half().float() == self.values) | self.values.isnan()).all())

    def strongest(self, kept: Float[Tensor, "pattern step"]) -> dict[str, Any]:
        """The kept keys and their scores, one pattern after the other and in each one step after the other."""
        chosen: Bool[Tensor, "pattern step key"] = torch.arange(self.values.shape[-1]) < kept[..., None]
        keys = self.order[chosen].numpy()
        scores = self.ranked[chosen].numpy()
        return {
            "count": packed(narrow(kept.numpy(), self.values.shape[-1])),
            "key": packed(narrow(keys, self.values.shape[-1])),
            "score": packed(scores.astype(np.float16) if self.halves else scores),
        }

    def statistics(self) -> dict[str, Any]:
        """What the thresholds are made of."""
        keys = self.values.shape[-1]
        return {
            "defined": packed(narrow(self.defined.numpy(), keys)),
            "total": packed(self.total.numpy()),
            "std": packed(self.std.nan_to_num(nan=0.0).numpy()),
        }

    def edges(self, colours: int) -> list[float]:
        """Borders of the colour bins, up to the highest score."""
        above = [
            2 ** (i / max(1, colours)) for i in range(math.ceil(math.log2(self.highest) * max(1, colours)) + 1)
        ]
        return ([0.25, 0.5] if colours > 1 else [0.5] if colours else []) + above

    def bins(self, colours: int) -> dict[str, Any]:
        """The bin of every score [pattern, key, step]: 0 undefined, i + 1 above i borders.

        Steps come last: a key's score changes little from step to step, which deflates well.
        """
        edges = torch.tensor(self.edges(colours))
        codes = torch.bucketize(self.values, edges, right=True).add_(1).masked_fill_(self.values.isnan(), 0)
        return packed(codes.to(torch.uint8).transpose(1, 2).numpy())


def _up(limit: float) -> float:
    return math.ceil((limit + MARGIN) * 1000) / 1000
