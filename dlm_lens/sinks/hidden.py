"""Detectors that read hidden states: massive activations and low key norms, and the statistic that they judge."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.prompt_positions import padding_before
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks.parameters import check_not_negative, check_part, check_positive
from dlm_lens.sinks.received import AXES, Level, Scale
from dlm_lens.sinks.rules import Quantity

HiddenQuantity = Literal["max activation", "key norm"]
"""max_d |h_jd| of the residual stream that enters a layer; the L2 norm ||k_j|| of a key."""


@dataclass(frozen=True, eq=False)
class KeyStatistic:
    """A number per position that is no attention, at every step, for detectors that read hidden states.

    All five axes are always there; `dims` names those that mean something, the others have size 1.

    Args:
        values: the statistic; NaN where a position is undefined (padding, not yet written in an AR baseline).
        quantity: what it is: "max activation" (no head axis) or "key norm" (every query head has its key's).
        median: median over positions and features of |h|, which "max activation" is compared with; None for the
            median of `values` over the positions.
        tokens, masked, valid, layers, tokenizer, sinks: as in `Received`.
        dims: names of the axes that mean something.

    Raises:
        ValueError: an unknown quantity, or shapes that contradict each other.
    """

    values: Float[Tensor, "step batch layer head key"]
    quantity: HiddenQuantity
    median: Float[Tensor, "step batch layer head 1"] | None = None
    tokens: Int[Tensor, "step batch key"] | None = None
    masked: Bool[Tensor, "step batch key"] | None = None
    valid: Bool[Tensor, "batch key"] | None = None
    layers: tuple[int, ...] = ()
    dims: tuple[str, ...] = AXES
    sinks: int = 0
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.quantity not in ("max activation", "key norm"):
            raise ValueError(f"KeyStatistic.quantity is {self.quantity!r}; 'max activation' or 'key norm'")
        check_shapes(self, **{"layer": len(self.layers)} if self.layers else {})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(AXES, self.values.shape, strict=True) if n in self.dims)
        return f"KeyStatistic({self.quantity}; {sizes})"

    @property
    def padding(self) -> Int[Tensor, "batch"] | None:
        """How many keys of each row are padding before its first token; None if there is no padding."""
        return None if self.valid is None else padding_before(self.valid)

    @property
    def level(self) -> Level:
        """Whose statistic it is: a head's, or a layer's where there is no head axis."""
        return "head" if "head" in self.dims else "layer"

    def read(self, quantity: Quantity) -> tuple[Float[Tensor, "step batch layer head key"], Scale]:
        """What a detector of this quantity judges, and its unit.

        Raises:
            ValueError: it is of another quantity.
        """
        if quantity != self.quantity:
            raise ValueError(f"this detector reads {quantity!r}, but the statistic is of {self.quantity!r}")
        return self.values, self.quantity


@dataclass(frozen=True)
class AboveMedian:
    """A position with an activation above `at_least` and `times` the median: max_d |h_jd| > max(a, t median |h|).

    2402.17762, section 2: magnitude above 100 and about 1,000 times the median magnitude of the hidden state, both
    here as defaults. h is the residual stream that enters the layer, in the model's units (from 0, unbounded);
    the median is over positions and features, `KeyStatistic.median`. Small models stay below 100 by construction:
    `AboveMedian(times=10, at_least=0)` asks for the ratio alone.

    Raises:
        ValueError: a number below 0, or `times` 0.
    """

    times: float = 1000.0
    at_least: float = 100.0

    def __post_init__(self) -> None:
        check_positive("AboveMedian", "times", self.times)
        check_not_negative("AboveMedian", "at_least", self.at_least)

    @property
    def quantity(self) -> Quantity:
        """The largest activation of a position."""
        return "max activation"

    def thresholds(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Float[Tensor, "*axes key"]:
        """max(at_least, times * median |h|), the same for every defined position."""
        level = (self.times * _median(scores, median)).clamp(min=self.at_least)
        return level.expand(scores.shape).masked_fill(scores.isnan(), torch.nan)

    def detect(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Bool[Tensor, "*axes key"]:
        """Whether the largest activation is above the threshold."""
        return scores > self.thresholds(scores, median)


@dataclass(frozen=True)
class LowKeyNorm:
    """A position whose key is short: ||k_j|| < below * median_k ||k_k||, over the defined keys.

    That sinks have short keys is an observation of 2406.11430 and 2410.10781 (section 4); neither gives a
    threshold: `below` is ours, from 0 to 1. The norm is that of the key as the head uses it (with its bias; the
    rotation does not change it); with grouped queries the heads of a group share one.

    Raises:
        ValueError: below is not between 0 and 1.
    """

    below: float = 0.5
    low_is_strong: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_part("LowKeyNorm", "below", self.below)

    @property
    def quantity(self) -> Quantity:
        """The norm of a key."""
        return "key norm"

    def thresholds(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Float[Tensor, "*axes key"]:
        """Below * median norm, the same for every defined key."""
        level = self.below * _median(scores, median)
        return level.expand(scores.shape).masked_fill(scores.isnan(), torch.nan)

    def detect(
        self, scores: Float[Tensor, "*axes key"], median: Float[Tensor, "*axes 1"] | None = None
    ) -> Bool[Tensor, "*axes key"]:
        """Whether the norm is below the threshold."""
        return scores < self.thresholds(scores, median)


def _median(scores: Tensor, median: Tensor | None) -> Tensor:
    """The given median, or the (lower) median of the defined scores."""
    return scores.nanmedian(-1, keepdim=True).values if median is None else median.to(scores.dtype)
