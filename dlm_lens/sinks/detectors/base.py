"""`Detector`, the base class of all rules, and what several of them share."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.placement import in_float64
from dlm_lens.printable import shown
from dlm_lens.sinks.detector_registry import check_setting, parse_detector

AttentionQuantity = Literal["received", "share", "mean attention"]
"""Scores of attention: received attention (relative to uniform, or column sums), the share of all counted
attention, the mean over the queries that see the key."""

HiddenQuantity = Literal["max activation", "key norm"]
"""Scores of hidden states: max_d |h_jd| of the residual stream that enters a layer; the L2 norm ||k_j||_2."""

Quantity = Literal[AttentionQuantity, HiddenQuantity]
"""The quantity that a detector reads."""


def settings_as_floats(detector: "Detector") -> None:
    """Store whole numbers as the floats that the fields are: equal rules print alike, in records too."""
    for each in fields(detector):
        value = getattr(detector, each.name)
        if each.type is float and isinstance(value, int):
            object.__setattr__(detector, each.name, float(value))


@dataclass(frozen=True)
class Detector:
    """A rule that calls keys sinks by their scores, for one pattern at a time (the last axis).

    The base class of every rule: a frozen dataclass whose fields are its settings, so that rules compare by value
    and print as the call that makes them. A rule overrides `thresholds` (`detect` if it has no threshold) and those
    of the attributes below whose defaults do not fit it. Keys whose score is NaN are undefined and never sinks.

    Attributes:
        quantity: which scores the rule reads; "received" unless overridden.
        low_is_sink: whether sinks have low scores; False, so that sinks have high ones.
        hysteresis_setting: the field that `relaxed` multiplies; None for a rule without hysteresis.
        leaves_one: whether at least one key of every pattern is no sink, whatever the scores; False if unknown.
        max_sinks: the largest number of sinks in one pattern; None for no limit.
    """

    low_is_sink: ClassVar[bool] = False
    hysteresis_setting: ClassVar[str | None] = None
    leaves_one: ClassVar[bool] = False

    @property
    def quantity(self) -> Quantity:
        """Which scores the rule reads."""
        return "received"

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the quantity is one of hidden states, which received attention does not hold."""
        return self.quantity in get_args(HiddenQuantity)

    @property
    def max_sinks(self) -> int | None:
        """The largest number of sinks in one pattern; None for no limit."""
        return None

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The threshold of every key; NaN (here: everywhere) where there is none."""
        return torch.full_like(scores, torch.nan)

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Which keys are sinks: score_j > threshold_j (or <, if `low_is_sink`); False for NaN."""
        return self._passes(scores, self.thresholds(scores))

    def _passes(self, scores: Tensor, thresholds: Tensor) -> Tensor:
        return scores < thresholds if self.low_is_sink else scores > thresholds

    def relaxed(self, factor: float) -> Self:
        """The same rule with its `hysteresis_setting` times `factor`.

        Raises:
            TypeError: the rule has no such setting.
        """
        if self.hysteresis_setting is None:
            raise TypeError(
                f"{self!r} has no hysteresis_setting; give hysteresis=1.0 to follow its sinks without it"
            )
        return replace(self, **{self.hysteresis_setting: getattr(self, self.hysteresis_setting) * factor})

    def holds(self, scores: Float[Tensor, "*axes key"], factor: float) -> Bool[Tensor, "*axes key"]:
        """Which keys stay sinks if they were sinks a step before: score_j >= threshold_j of `relaxed(factor)`.

        Raises:
            TypeError: the rule has no hysteresis.
        """
        return scores >= self.relaxed(factor).thresholds(scores)


@dataclass(frozen=True)
class ConstantThreshold(Detector):
    """A detector with one threshold, between 0 and 1, for every key.

    Raises:
        ValueError: the threshold is not between 0 and 1.
    """

    threshold: float = 0.3
    hysteresis_setting: ClassVar[str | None] = "threshold"

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_setting(type(self).__name__, "threshold", self.threshold, "fraction")
        settings_as_floats(self)

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """The constant, where the key is defined."""
        return torch.full_like(scores, self.threshold).masked_fill(scores.isnan(), torch.nan)


@dataclass(frozen=True)
class MedianDetector(Detector):
    """A detector of hidden states, whose threshold is a multiple of a median.

    `find_sinks` passes the median of a `KeyStatistic` if it has one; with None it is the median of the defined
    scores (of an even number the lower middle one).
    """

    def thresholds(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Float[Tensor, "*axes key"]:
        """The threshold of every defined key, the same for all of a pattern."""
        middle = scores.nanmedian(-1, keepdim=True).values if median is None else median.to(scores.dtype)
        return self.multiple(middle).expand(scores.shape).masked_fill(scores.isnan(), torch.nan)

    def multiple(self, median: Float[Tensor, "*axes 1"]) -> Float[Tensor, "*axes 1"]:
        """The threshold, from the median."""
        raise NotImplementedError

    def detect(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Bool[Tensor, "*axes key"]:
        """Which keys are sinks: above the threshold, or below it if `low_is_sink`."""
        return self._passes(scores, self.thresholds(scores, median))


def mean_and_std(scores: Float[Tensor, "*axes key"]) -> tuple[Float[Tensor, "*axes 1"], Float[Tensor, "*axes 1"]]:
    """Mean and standard deviation (population) over the defined keys, in float64."""
    wide = in_float64(scores, copy=True).nan_to_num_(nan=0.0)
    undefined = scores.isnan().to(wide.device)
    count = scores.shape[-1] - undefined.sum(-1, keepdim=True)
    mean = wide.sum(-1, keepdim=True) / count
    off = wide.sub_(mean).masked_fill_(undefined, 0.0)
    return mean, (off.square_().sum(-1, keepdim=True) / count).sqrt()


def of_every_key(detector: Detector, method: str, value: Any, scores: Tensor) -> Tensor:
    """What a method of a detector returned for these scores: truth values of `detect`, numbers of `thresholds`.

    Raises:
        ValueError: no tensor, another shape or another kind.
    """
    kind = "truth values" if method == "detect" else "numbers"
    if (
        not isinstance(value, Tensor)
        or value.shape != scores.shape
        or (value.dtype == torch.bool) != (method == "detect")
    ):
        raise ValueError(
            f"{detector}.{method} returned {shown(value)}; return {kind} in a tensor of the scores' shape, "
            f"{list(scores.shape)}"
        )
    return value


def as_detector(detector: Detector | str | Any) -> Detector:
    """A detector as it is, or the one that a text names, such as "above-std:3".

    Raises:
        TypeError: neither, such as a class instead of an instance.
        ValueError: a text that names no detector, or a number that it does not take.
    """
    if isinstance(detector, str):
        detector = parse_detector(detector, option="detector").build()
    if isinstance(detector, type) or not isinstance(detector, Detector):
        raise TypeError(
            f"{shown(detector)} is not a detector; give one with its settings, such as AboveMean(eps=3.0) or "
            "'above-mean:3'"
        )
    return detector
