"""`AboveMean`: Eq. 3 of 2510.15731."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import flag, store_plain_numbers
from dlm_lens.placement import in_float64
from dlm_lens.sinks.detector_registry import DetectorEntry
from dlm_lens.sinks.detectors.base import Detector, Quantity, settings_as_floats

ENTRY = DetectorEntry(
    name="above-mean",
    kind="AboveMean",
    setting="eps",
    values="not negative",
    formula="score > mean of the others + eps",
)


@dataclass(frozen=True)
class AboveMean(Detector):
    """A sink receives eps more than the others do on average: score_j > mean_{k != j} score_k + eps.

    2510.15731, Eq. 3, with eps = 3 as there, on received attention relative to uniform (or on column sums with
    `relative=False`) instead of the literal A-bar, on which no score reaches eps = 3. In a full bidirectional
    pass of S queries the mean of all scores is 1, so eps = 3 means score_j > 4 - 3 / S, a share of attention
    above (4 - 3 / S) / S: 6.18% at S = 64, 0.78% at S = 512. Scores range from 0 to S, so that no score reaches an
    eps of S or more. With one defined key there are no others, and no sink. At eps = 0 rounding decides between
    scores that are equal up to rounding.

    `literal=True` takes Eq. 3 as it is printed, on A-bar_j = r_j / S of S counted queries, the share of attention
    from 0 to 1: a finite choice is 0 < eps < 1, and eps = 3 finds nothing in any pattern. In a full bidirectional
    pass `AboveMean(eps / S, literal=True)` is `AboveMean(eps)`.

    Raises:
        ValueError: eps is negative or not a finite number, or literal is neither True nor False.
    """

    eps: float = 3.0
    literal: bool = False

    hysteresis_setting: ClassVar[str | None] = "eps"
    leaves_one: ClassVar[bool] = True

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        ENTRY.check(self.eps)
        flag().check("AboveMean.literal", self.literal)
        settings_as_floats(self)

    def __repr__(self) -> str:
        return f"AboveMean(eps={self.eps!r}{', literal=True' if self.literal else ''})"

    @property
    def quantity(self) -> Quantity:
        """Received attention, or shares of it if Eq. 3 is taken literally."""
        return "share" if self.literal else "received"

    def thresholds(self, scores: Float[Tensor, "*axes key"]) -> Float[Tensor, "*axes key"]:
        """Mean over the other defined keys, plus eps."""
        undefined = scores.isnan()
        others = scores.shape[-1] - 1 - undefined.sum(-1, keepdim=True)
        # In place: on large inputs fetching fresh memory costs more than the arithmetic.
        wide = in_float64(scores, copy=True).nan_to_num_(nan=0.0)
        total = wide.sum(-1, keepdim=True)
        # 0 / 0 where there are no others: no threshold.
        level = wide.neg_().add_(total).div_(others.to(wide.device)).add_(self.eps)
        return level.to(scores).masked_fill_(undefined | (others < 1), torch.nan)
