"""`AboveStd` and `SoftSigmoid`: thresholds of k standard deviations above the mean."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.placement import in_float64
from dlm_lens.sinks.detector_registry import DetectorEntry, check_setting
from dlm_lens.sinks.detectors.base import Detector, mean_and_std, settings_as_floats

ABOVE_STD = DetectorEntry(
    name="above-std",
    kind="AboveStd",
    setting="k",
    values="not negative",
    formula="score > mean + k std",
)

SOFT_SIGMOID = DetectorEntry(
    name="soft-sigmoid",
    kind="SoftSigmoid",
    setting="alpha",
    values="positive",
    formula="sigmoid(alpha (score - mean - k std)) > above",
)


def _constant(scores: Tensor, mean: Tensor, std: Tensor, level: Tensor) -> Tensor:
    """One threshold for all defined keys; none where the scores differ by rounding alone."""
    level = level.masked_fill(std <= 1e-6 * mean.abs(), torch.nan)
    return level.expand(scores.shape).to(scores).masked_fill(scores.isnan(), torch.nan)


@dataclass(frozen=True)
class AboveStd(Detector):
    """A sink is a high outlier: score_j > mean + k * std over all defined keys, j among them.

    A z-score; the share of tokens that eps = 3 selects (2510.15731, Appendix B) fits this reading too. std is
    the population's (divided by n), so that a z-score is at most sqrt(n - 1): k = 3 needs n > 10 defined keys.
    The rule does not depend on a common factor of the scores. Where the scores differ by no more than float32
    rounding (std below 1e-6 of the mean), no key is a sink.

    Raises:
        ValueError: k is negative or not a finite number.
    """

    k: float = 3.0

    hysteresis_setting: ClassVar[str | None] = "k"
    leaves_one: ClassVar[bool] = True

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        ABOVE_STD.check(self.k)
        settings_as_floats(self)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean plus k standard deviations, the same for every defined key."""
        mean, std = mean_and_std(scores)
        return _constant(scores, mean, std, mean + self.k * std)


@dataclass(frozen=True)
class SoftSigmoid(Detector):
    """A sink has a soft sink weight above one half: w_j = sigmoid(alpha (m_j - mean - k std)) > above.

    Sink-Aware Pruning, 2602.17664, with alpha = 5 and k = 2; m_j is the mass that key j receives, mean and std
    (population) are over all defined keys. `weights` gives w_j, from 0 to 1; with above = 0.5 the sinks are those
    of `AboveStd(k)`, and alpha sets how soft the border is. alpha has the unit 1 / score: the paper sums the mass
    over heads and layers, here it is the score at the requested level (relative to uniform, or column sums).

    Raises:
        ValueError: alpha, k or above is out of range.
    """

    alpha: float = 5.0
    k: float = 2.0
    above: float = 0.5

    hysteresis_setting: ClassVar[str | None] = "k"

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        SOFT_SIGMOID.check(self.alpha)
        check_setting("SoftSigmoid", "k", self.k, "not negative")
        check_setting("SoftSigmoid", "above", self.above, "fraction")
        settings_as_floats(self)

    def weights(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """w_j, the soft sink weight of each key, from 0 to 1; NaN where it is undefined."""
        mean, std = mean_and_std(scores)
        return torch.sigmoid(self.alpha * (in_float64(scores) - mean - self.k * std)).to(scores)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The score at which w_j is `above`: mean + k std + logit(above) / alpha."""
        mean, std = mean_and_std(scores)
        offset = math.log(self.above / (1 - self.above)) / self.alpha
        return _constant(scores, mean, std, mean + self.k * std + offset)
