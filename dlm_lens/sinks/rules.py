"""What a detector is, and what detectors with a threshold have in common."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.sinks.parameters import check_part

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
    """A detector with one threshold x, between 0 and 1, for every key.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    x: float = 0.3

    def __post_init__(self) -> None:
        check_part(type(self).__name__, "x", self.x)

    def relaxed(self, factor: float) -> Self:
        """The same rule with x times `factor`."""
        return replace(self, x=self.x * factor)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The constant x, where the key is defined."""
        return torch.full_like(scores, self.x).masked_fill(scores.isnan(), torch.nan)


def mean_and_std(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (population) over the defined keys, in float64; the key axis keeps size 1."""
    undefined = scores.isnan()
    count = scores.shape[-1] - undefined.sum(-1, keepdim=True)
    wide = scores.to(torch.float64, copy=True).nan_to_num_(nan=0.0)
    mean = wide.sum(-1, keepdim=True) / count
    off = wide.sub_(mean).masked_fill_(undefined, 0.0)
    return mean, (off.square_().sum(-1, keepdim=True) / count).sqrt()
