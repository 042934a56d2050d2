"""`TopK`: the keys that receive most."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.attention import top_columns
from dlm_lens.sinks.detector_registry import DetectorEntry
from dlm_lens.sinks.detectors.base import Detector

ENTRY = DetectorEntry(
    name="top-k",
    kind="TopK",
    setting="k",
    values="count",
    formula="the k keys that receive most",
    default=5,
)


@dataclass(frozen=True)
class TopK(Detector):
    """The k keys that receive most are sinks, however little that is; there is no threshold.

    Where fewer than k keys are defined, all of them; of equal scores the earlier position comes first.

    Raises:
        ValueError: k is not a whole number of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        ENTRY.check(self.k)

    @property
    def max_sinks(self) -> int:
        """The number k."""
        return self.k

    def detect(self, scores: Float[Tensor, "*axes key"]) -> Bool[Tensor, "*axes key"]:
        """Which keys are among the k highest of their pattern."""
        return top_columns(scores, self.k)

    def holds(self, scores: Float[Tensor, "*axes key"], factor: float) -> Bool[Tensor, "*axes key"]:
        """As `detect`: a rank has no threshold to lower, so that there is no hysteresis."""
        return self.detect(scores)
