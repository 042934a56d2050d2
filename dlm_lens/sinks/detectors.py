"""Detectors: the rules that call a column a sink. Small frozen values, compared and printed by their settings."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import top_columns

Quantity = Literal["received", "share"]
"""What a detector reads: received attention (relative to uniform, or column sums), or shares of all attention."""


@runtime_checkable
class Detector(Protocol):
    """A rule over the scores of one pattern's keys, the last axis; NaN keys are undefined and never sinks."""

    @property
    def quantity(self) -> Quantity:
        """Which quantity the scores must be."""
        ...

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """What each key's score is compared with; NaN where the rule has no threshold."""
        ...

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Which keys are sinks."""
        ...


class _Threshold:
    """A detector whose sinks are the scores strictly above `thresholds`."""

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        raise NotImplementedError

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Whether score_j > threshold_j; a comparison with NaN is False."""
        return scores > self.thresholds(scores)


@dataclass(frozen=True)
class AboveMean(_Threshold):
    """A sink receives eps more than the others do on average: score_j > mean_{k != j} score_k + eps.

    2510.15731, Eq. 3, with eps = 3 as there, on received attention relative to uniform (or on column sums with
    `relative=False`) instead of the literal A-bar, on which eps = 3 is out of reach. In a full bidirectional
    pass of S queries the mean of all scores is 1, so eps = 3 means score_j > 4 - 3 / S, a share of attention
    above (4 - 3 / S) / S: 6.18% at S = 64, 0.78% at S = 512. Scores range from 0 to S, so that eps must be
    below S to be in reach. With one defined key there are no others, and no sink.

    Raises:
        ValueError: eps is not a finite number.
    """

    eps: float = 3.0

    def __post_init__(self) -> None:
        _check_finite("AboveMean", "eps", self.eps)

    @property
    def quantity(self) -> Quantity:
        """Received attention."""
        return "received"

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean over the other defined keys, plus eps."""
        defined, wide = ~scores.isnan(), scores.double().nan_to_num(nan=0.0)
        others = defined.sum(-1, keepdim=True) - 1
        # 0 / 0 where there are no others: NaN, no threshold.
        mean = (wide.sum(-1, keepdim=True) - wide) / others
        return (mean + self.eps).to(scores.dtype).masked_fill(~defined | (others < 1), torch.nan)


@dataclass(frozen=True)
class AboveStd(_Threshold):
    """A sink is a high outlier: score_j > mean + k * std over all defined keys, j among them.

    A z-score; the share of tokens that eps = 3 selects (2510.15731, Appendix B) fits this reading too. std is
    the population's (divided by n), so that a z-score is at most sqrt(n - 1): k = 3 needs n > 10 defined keys.
    The rule does not depend on a common factor of the scores. Where the scores differ by no more than float32
    rounding (std below 1e-6 of the mean), no key is a sink.

    Raises:
        ValueError: k is not a finite number.
    """

    k: float = 3.0

    def __post_init__(self) -> None:
        _check_finite("AboveStd", "k", self.k)

    @property
    def quantity(self) -> Quantity:
        """Received attention."""
        return "received"

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean plus k standard deviations, the same for every defined key."""
        defined, wide = ~scores.isnan(), scores.double()
        mean = wide.nanmean(-1, keepdim=True)
        std = (wide - mean).square().nanmean(-1, keepdim=True).sqrt()
        level = (mean + self.k * std).masked_fill(std <= 1e-6 * mean.abs(), torch.nan)
        return level.expand_as(wide).to(scores.dtype).masked_fill(~defined, torch.nan)


@dataclass(frozen=True)
class Share(_Threshold):
    """A sink takes more than x of all attention: r_j / sum_k r_k > x.

    r_j are the raw column sums over the counted queries, whatever the scale asked for, and sum_k r_k is the
    number of counted queries. Shares compare sequences of different lengths (even attention gives 1 / S), but
    know nothing of the causal mask: the first key of an AR baseline has H_S / S under even attention, 7.4% at
    S = 64.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    x: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.x < 1:
            raise ValueError(f"Share(x={self.x}): x is a part of all attention and must lie between 0 and 1")

    @property
    def quantity(self) -> Quantity:
        """Shares of all counted attention."""
        return "share"

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The constant x, where the key is defined."""
        return torch.full_like(scores, self.x).masked_fill(scores.isnan(), torch.nan)


@dataclass(frozen=True)
class TopK:
    """The k keys that receive most are sinks, however little that is; no threshold.

    Where fewer than k keys are defined, all of them; of equal scores the earlier position wins.

    Raises:
        ValueError: k is not a whole number of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"TopK(k={self.k!r}): k must be a whole number of at least 1")

    @property
    def quantity(self) -> Quantity:
        """Received attention."""
        return "received"

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """NaN everywhere: what counts is the rank."""
        return torch.full_like(scores, torch.nan)

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Which keys are among the k highest of their pattern."""
        return top_columns(scores, self.k)


def _check_finite(rule: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{rule}({name}={value!r}): {name} must be a finite number")
