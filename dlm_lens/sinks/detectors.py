"""Detectors: the rules that call a column a sink. Small frozen values, compared and printed by their settings."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import top_columns
from dlm_lens.sinks.detector_registry import check_count, check_not_negative, check_part, check_positive

Quantity = Literal["received", "share", "mean attention", "max activation", "key norm"]
"""What a detector reads.

Of attention: "received" (relative to uniform, or column sums), the "share" of all counted attention, "mean
attention" (over the queries that see the key). Of hidden states, see `KeyStatistic`: "max activation" of the
residual stream, and the "key norm".
"""


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


@runtime_checkable
class Hysteretic(Protocol):
    """A detector that also says which keys stay sinks once they are: down to a part of its threshold."""

    def holds(self, scores: Float[Tensor, "*axes key"], factor: float) -> Bool[Tensor, "*axes key"]:
        """Whether a key that is a sink stays one."""
        ...


class Threshold:
    """A detector whose sinks are the scores strictly above `thresholds`."""

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """What each key's score is compared with; NaN where the rule has no threshold."""
        raise NotImplementedError

    def relaxed(self, factor: float) -> Self:
        """The same rule with its threshold's number times `factor`."""
        raise NotImplementedError

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Whether score_j > threshold_j; a comparison with NaN is False."""
        return scores > self.thresholds(scores)

    def holds(self, scores: Float[Tensor, "*axes key"], factor: float) -> Bool[Tensor, "*axes key"]:
        """Whether score_j is not below the threshold of the `relaxed` rule: a sink stays a sink so far."""
        return scores >= self.relaxed(factor).thresholds(scores)


@dataclass(frozen=True)
class ConstantThreshold(Threshold):
    """A detector with one threshold, between 0 and 1, for every key.

    Raises:
        ValueError: the threshold is not between 0 and 1.
    """

    threshold: float = 0.3

    def __post_init__(self) -> None:
        check_part(type(self).__name__, "threshold", self.threshold)

    def relaxed(self, factor: float) -> Self:
        """The same rule with its threshold times `factor`."""
        return replace(self, threshold=self.threshold * factor)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The constant, where the key is defined."""
        return torch.full_like(scores, self.threshold).masked_fill(scores.isnan(), torch.nan)


def mean_and_std(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (population) over the defined keys, in float64; the key axis keeps size 1."""
    undefined = scores.isnan()
    count = scores.shape[-1] - undefined.sum(-1, keepdim=True)
    wide = scores.to(torch.float64, copy=True).nan_to_num_(nan=0.0)
    mean = wide.sum(-1, keepdim=True) / count
    off = wide.sub_(mean).masked_fill_(undefined, 0.0)
    return mean, (off.square_().sum(-1, keepdim=True) / count).sqrt()


@dataclass(frozen=True)
class AboveMean(Threshold):
    """A sink receives eps more than the others do on average: score_j > mean_{k != j} score_k + eps.

    2510.15731, Eq. 3, with eps = 3 as there, on received attention relative to uniform (or on column sums with
    `relative=False`) instead of the literal A-bar, on which eps = 3 is out of reach. In a full bidirectional
    pass of S queries the mean of all scores is 1, so eps = 3 means score_j > 4 - 3 / S, a share of attention
    above (4 - 3 / S) / S: 6.18% at S = 64, 0.78% at S = 512. Scores range from 0 to S, so that eps must be
    below S to be in reach. With one defined key there are no others, and no sink.

    `literal=True` takes Eq. 3 as it is printed, on A-bar_j = r_j / S of S counted queries, the share of attention
    from 0 to 1: a finite choice is 0 < eps < 1, and eps = 3 finds nothing in any pattern. In a full bidirectional
    pass `AboveMean(eps / S, literal=True)` is `AboveMean(eps)`.

    Raises:
        ValueError: eps is negative or not a finite number.
    """

    eps: float = 3.0
    literal: bool = False

    def __post_init__(self) -> None:
        check_not_negative("AboveMean", "eps", self.eps)

    def __repr__(self) -> str:
        return f"AboveMean(eps={self.eps!r}{', literal=True' if self.literal else ''})"

    @property
    def quantity(self) -> Quantity:
        """Received attention; shares of it where Eq. 3 is taken literally."""
        return "share" if self.literal else "received"

    def relaxed(self, factor: float) -> "AboveMean":
        """The same rule with eps times `factor`."""
        return replace(self, eps=self.eps * factor)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean over the other defined keys, plus eps."""
        undefined = scores.isnan()
        others = scores.shape[-1] - 1 - undefined.sum(-1, keepdim=True)
        # In place: on large inputs fetching fresh memory costs more than the arithmetic.
        wide = scores.to(torch.float64, copy=True).nan_to_num_(nan=0.0)
        total = wide.sum(-1, keepdim=True)
        # 0 / 0 where there are no others: no threshold.
        level = wide.neg_().add_(total).div_(others).add_(self.eps)
        return level.to(scores.dtype).masked_fill_(undefined | (others < 1), torch.nan)


@dataclass(frozen=True)
class AboveStd(Threshold):
    """A sink is a high outlier: score_j > mean + k * std over all defined keys, j among them.

    A z-score; the share of tokens that eps = 3 selects (2510.15731, Appendix B) fits this reading too. std is
    the population's (divided by n), so that a z-score is at most sqrt(n - 1): k = 3 needs n > 10 defined keys.
    The rule does not depend on a common factor of the scores. Where the scores differ by no more than float32
    rounding (std below 1e-6 of the mean), no key is a sink.

    Raises:
        ValueError: k is negative or not a finite number.
    """

    k: float = 3.0

    def __post_init__(self) -> None:
        check_not_negative("AboveStd", "k", self.k)

    @property
    def quantity(self) -> Quantity:
        """Received attention."""
        return "received"

    def relaxed(self, factor: float) -> "AboveStd":
        """The same rule with k times `factor`."""
        return AboveStd(self.k * factor)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean plus k standard deviations, the same for every defined key."""
        mean, std = mean_and_std(scores)
        level = (mean + self.k * std).masked_fill(std <= 1e-6 * mean.abs(), torch.nan)
        return level.expand(scores.shape).to(scores.dtype).masked_fill(scores.isnan(), torch.nan)


@dataclass(frozen=True)
class AttentionShare(ConstantThreshold):
    """A sink takes more than x of all attention: r_j / sum_k r_k > x.

    r_j are the raw column sums over the counted queries, whatever the scale asked for, and sum_k r_k is the
    number of counted queries. Shares compare sequences of different lengths (even attention gives 1 / S), but
    know nothing of the causal mask: the first key of an AR baseline has H_S / S under even attention, 7.4% at
    S = 64.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    @property
    def quantity(self) -> Quantity:
        """Shares of all counted attention."""
        return "share"


@dataclass(frozen=True)
class MeanReceived(ConstantThreshold):
    """A sink gets more than x of the attention of those who see it, on average: alpha_j = r_j / n_j > x.

    2410.10781, section 3.1: alpha_k = 1 / (T - k + 1) sum_{i >= k} A_ik with x = 0.3; the share of (layer, head)
    whose key k passes is its sink rate, see `sink_rate`. n_j is the number of counted queries that see key j, so
    that a causal mask does not make the first key a sink: even attention gives its alpha H_S / S (7.4% at S = 64),
    as `AttentionShare` does, but the last keys are not divided by viewers that they never had. From 0 to 1. In a
    full bidirectional pass it is `AttentionShare(x)`; even attention has 1 / S there.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    @property
    def quantity(self) -> Quantity:
        """Attention from the counted queries that see the key, on average."""
        return "mean attention"


@dataclass(frozen=True)
class SoftSigmoid(Threshold):
    """A sink has a soft sink weight above one half: w_j = sigmoid(alpha (m_j - mean - k std)) > above.

    Sink-Aware Pruning, 2602.17664, with alpha = 5 and k = 2; m_j is the mass that key j receives, mean and std
    (population) are over all defined keys. `weights` gives w_j, from 0 to 1; with above = 0.5 the sinks are those
    of `AboveStd(k)`, and alpha says how soft the border is. alpha has the unit 1 / score: the paper sums the mass
    over heads and layers, here it is the score of the level asked for (relative to uniform, or column sums).

    Raises:
        ValueError: alpha, k or above is out of range.
    """

    alpha: float = 5.0
    k: float = 2.0
    above: float = 0.5

    def __post_init__(self) -> None:
        check_positive("SoftSigmoid", "alpha", self.alpha)
        check_not_negative("SoftSigmoid", "k", self.k)
        check_part("SoftSigmoid", "above", self.above)

    @property
    def quantity(self) -> Quantity:
        """Received attention."""
        return "received"

    def relaxed(self, factor: float) -> "SoftSigmoid":
        """The same rule with k times `factor`."""
        return replace(self, k=self.k * factor)

    def weights(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """w_j, how much of a sink each key is; NaN where it is undefined."""
        mean, std = mean_and_std(scores)
        return torch.sigmoid(self.alpha * (scores.double() - mean - self.k * std)).to(scores.dtype)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The score at which w_j is `above`: mean + k std + logit(above) / alpha."""
        mean, std = mean_and_std(scores)
        level = mean + self.k * std + math.log(self.above / (1 - self.above)) / self.alpha
        level = level.masked_fill(std <= 1e-6 * mean.abs(), torch.nan)
        return level.expand(scores.shape).to(scores.dtype).masked_fill(scores.isnan(), torch.nan)


@dataclass(frozen=True)
class TopK:
    """The k keys that receive most are sinks, however little that is; no threshold.

    Where fewer than k keys are defined, all of them; of equal scores the earlier position wins.

    Raises:
        ValueError: k is not a whole number of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        check_count("TopK", "k", self.k)

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

    def holds(self, scores: Float[Tensor, "*axes key"], factor: float) -> Bool[Tensor, "*axes key"]:
        """As `detect`: a rank has no threshold that could be lower for those that are sinks already."""
        return self.detect(scores)
