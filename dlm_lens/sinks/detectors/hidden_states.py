"""`AboveMedian` and `LowKeyNorm`: detectors of hidden states, which read a `KeyStatistic`."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.sinks.detector_registry import DetectorEntry, check_setting
from dlm_lens.sinks.detectors.base import MedianDetector, Quantity, settings_as_floats

ABOVE_MEDIAN = DetectorEntry(
    name="above-median",
    kind="AboveMedian",
    setting="times",
    values="positive",
    formula="largest activation > max(at_least, times the median)",
)

LOW_KEY_NORM = DetectorEntry(
    name="low-key-norm",
    kind="LowKeyNorm",
    setting="below",
    values="fraction",
    formula="norm of the key < below times the median norm",
)


@dataclass(frozen=True)
class AboveMedian(MedianDetector):
    """A position with an activation above `at_least` and `times` the median: max_d |h_jd| > max(a, t median |h|).

    2402.17762, section 2: magnitude above 100 and about 1,000 times the median magnitude of the hidden state, both
    here as defaults. h is the residual stream that enters the layer, in the model's units (from 0, unbounded);
    the median is over positions and features, `KeyStatistic.median`. Activations of small models stay below 100:
    `AboveMedian(times=10, at_least=0)` tests the ratio alone.

    Raises:
        ValueError: a number below 0, or `times` 0.
    """

    times: float = 1000.0
    at_least: float = 100.0

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        ABOVE_MEDIAN.check(self.times)
        check_setting("AboveMedian", "at_least", self.at_least, "not negative")
        settings_as_floats(self)

    @property
    def quantity(self) -> Quantity:
        """The largest activation of a position."""
        return "max activation"

    def multiple(self, median: Float[Tensor, "*axes 1"]) -> Float[Tensor, "*axes 1"]:
        """max(at_least, times * median |h|)."""
        return (self.times * median).clamp(min=self.at_least)


@dataclass(frozen=True)
class LowKeyNorm(MedianDetector):
    """A position whose key is short: ||k_j|| < below * median_k ||k_k||, over the defined keys.

    That sinks have short keys is an observation of 2406.11430 and 2410.10781 (section 4); neither gives a
    threshold: `below` is ours, from 0 to 1. The norm is that of the key as the head uses it (with its bias; the
    rotation does not change it); with grouped queries the heads of a group share one.

    Raises:
        ValueError: below is not between 0 and 1.
    """

    below: float = 0.5
    low_is_sink: ClassVar[bool] = True

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        LOW_KEY_NORM.check(self.below)
        settings_as_floats(self)

    @property
    def quantity(self) -> Quantity:
        """The norm of a key."""
        return "key norm"

    def multiple(self, median: Float[Tensor, "*axes 1"]) -> Float[Tensor, "*axes 1"]:
        """Below * median norm."""
        return self.below * median
