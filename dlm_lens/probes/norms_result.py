"""`ValueNorms`: the values of sinks against the values of matched other tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.probes.intervals import Estimate, Floats, difference_of, estimate, mean_of, ratio_of, summed
from dlm_lens.shapes import check_shapes

Alike = Literal["any", "masked"]

TIE = 1e-5
"""Norms that differ by less, relatively, are equal: equal tokens have equal values in the first layer, up to a
rounding that depends on where in a batch they stand."""


def shorter(one: Float[Tensor, "*places"], two: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
    """1 where the first norm is the shorter one, 0.5 at a tie, 0 where it is longer or undefined."""
    apart = one - two
    tie = apart.abs() <= TIE * two.abs()
    return torch.where(tie, 0.5, (apart < 0).double())


@dataclass(frozen=True, eq=False)
class ValueNorms:
    """Norms of the values of sinks, each beside that of another token of the same prompt, step, layer and head.

    Args:
        sink: norm of every drawn sink's value.
        other: norm of the token that stands beside it.
        percentile: share of the other tokens of the same pattern whose value is shorter, ties by half: 0 for the
            shortest of all.
        prompt: index of the row, whose tokens are drawn together in a bootstrap.
        layer: index in the model.
        rule: how the sinks were found.
        formula: which norm this is.
        alike: what the other token shares beside its place: "any", nothing; "masked", masked as the sink or not.
        found: how many sinks there were to draw from.
        unmatched: how many sinks drawn had no other token to stand beside, and are left out.
        profile: one line per layer, over all sinks and all others: norms, and the share of attention.
        seed: of the draw and of the intervals.

    Raises:
        ValueError: the arrays have unequal lengths.
    """

    sink: Float[Tensor, "pair"]
    other: Float[Tensor, "pair"]
    percentile: Float[Tensor, "pair"]
    prompt: Int[Tensor, "pair"]
    layer: Int[Tensor, "pair"]
    rule: str
    formula: str
    alike: Alike
    found: int
    unmatched: int
    profile: pd.DataFrame
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self)

    def __repr__(self) -> str:
        return (
            f"ValueNorms({len(self.sink)} pairs of {self.found} sinks by {self.rule}; sinks {self.mean_sink}, "
            f"others {self.mean_other}, ratio {self.ratio})"
        )

    @property
    def mean_sink(self) -> Estimate:
        """Mean norm of the sinks' values."""
        return self._estimate(mean_of, self.sink, None)

    @property
    def mean_other(self) -> Estimate:
        """Mean norm of the others' values."""
        return self._estimate(mean_of, self.other, None)

    @property
    def ratio(self) -> Estimate:
        """Mean of the sinks over mean of the others; below 1 where sinks have short values."""
        return self._estimate(ratio_of, self.sink, None, self.other, None)

    @property
    def difference(self) -> Estimate:
        """Mean of the sinks minus mean of the others."""
        return self._estimate(difference_of, self.sink, None, self.other, None)

    @property
    def effect_size(self) -> Estimate:
        """Cohen's d: the difference of the means over the root of the mean variance."""

        def cohen(sums: Floats) -> Floats:
            count, one, two, one_squared, two_squared = np.moveaxis(sums, -1, 0)
            means = one / count, two / count
            variance = (one_squared + two_squared) / count - means[0] ** 2 - means[1] ** 2
            found: Floats = (means[0] - means[1]) / np.sqrt(variance / 2)
            return found

        sink, other = self.sink.double(), self.other.double()
        return self._estimate(cohen, None, sink, other, sink**2, other**2)

    @property
    def shorter(self) -> Estimate:
        """Share of the pairs in which the sink's value is the shorter one, ties by half; 0.5 by chance."""
        below = shorter(self.sink, self.other)
        return self._estimate(mean_of, below, None)

    @property
    def mean_percentile(self) -> Estimate:
        """Mean percentile rank of a sink among the others of its pattern; 0 the shortest, 0.5 by chance."""
        return self._estimate(mean_of, self.percentile, None)

    @cached_property
    def _measures(self) -> dict[str, Estimate]:
        names = ("mean_sink", "mean_other", "ratio", "difference", "effect_size", "shorter", "mean_percentile")
        return {name: getattr(self, name) for name in names}

    def table(self) -> pd.DataFrame:
        """One line per measure: value, 95% interval, prompts."""
        return pd.DataFrame(
            [
                {"measure": name, "value": e.value, "low": e.low, "high": e.high, "prompts": e.prompts}
                for name, e in self._measures.items()
            ]
        )

    def distribution(self, bins: int = 40) -> pd.DataFrame:
        """How many of the sinks and of the others have which norm (2601.19657, Figure 1): low, high, sinks, others.

        Raises:
            ValueError: fewer than one bin.
        """
        if bins < 1:
            raise ValueError(f"distribution(bins={bins}): give at least one")
        top = float(torch.cat([self.sink, self.other]).max()) if len(self.sink) else 1.0
        edges = np.linspace(0, top * (1 + 1e-6), bins + 1)
        counts = {
            name: np.histogram(values, edges)[0] for name, values in (("sinks", self.sink), ("others", self.other))
        }
        return pd.DataFrame({"low": edges[:-1], "high": edges[1:], **counts})

    def _estimate(self, statistic: object, *summands: Tensor | None) -> Estimate:
        ones = torch.ones(len(self.sink), dtype=torch.float64)
        columns = [ones if values is None else values.double() for values in summands]
        prompts = int(self.prompt.max()) + 1 if len(self.prompt) else 0
        sums = summed(torch.stack(columns, -1), self.prompt, prompts)
        return estimate(sums, statistic, seed=self.seed)  # type: ignore[arg-type]
