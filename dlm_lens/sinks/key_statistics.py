"""`KeyStatistic`: a number per position from hidden states, the largest activation or the norm of the key."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import padding_before
from dlm_lens.sinks.detectors.base import HiddenQuantity, Quantity
from dlm_lens.sinks.key_axes import KeyAxes, axis_sizes
from dlm_lens.sinks.received import Level, Scale


@dataclass(frozen=True, eq=False)
class KeyStatistic(KeyAxes):
    """A statistic of hidden states per position and step, for detectors that read hidden states.

    Further arguments, by name, are those of `KeyAxes`.

    Args:
        values: the statistic; NaN where a position is undefined (padding, not decoded yet in an AR baseline).
        quantity: "max activation" (no head axis) or "key norm" (for every query head, of the key that it uses).
        median: median over positions and features of |h|, the reference of "max activation"; None for the median of
            `values` over the positions.
        valid: as in `Received`.

    Raises:
        ValueError: an unknown quantity, or shapes that contradict each other.
    """

    IDENTITY_ORDER = (
        "values quantity median tokens masked valid layers steps heads dims sinks tokenizer final_tokens"
    )

    values: Float[Tensor, "step batch layer head key"]
    quantity: HiddenQuantity
    median: Float[Tensor, "step batch layer head 1"] | None = None
    valid: Bool[Tensor, "batch key"] | None = None

    def __post_init__(self) -> None:
        if self.quantity not in ("max activation", "key norm"):
            raise ValueError(f"KeyStatistic.quantity is {self.quantity!r}; 'max activation' or 'key norm'")
        super().__post_init__()

    def __repr__(self) -> str:
        return f"KeyStatistic({self.quantity}; {', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis in `dims`."""
        return axis_sizes(self.values.shape, self.dims)

    @property
    def padding(self) -> Int[Tensor, "batch"] | None:
        """How many keys of each row are padding before its first token; None if there is no padding."""
        return None if self.valid is None else padding_before(self.valid)

    @property
    def level(self) -> Level:
        """The level of the statistic: "head", or "layer" if there is no head axis."""
        return "head" if "head" in self.dims else "layer"

    def read(self, quantity: Quantity) -> tuple[Float[Tensor, "step batch layer head key"], Scale]:
        """The values that a detector of this quantity reads, and their scale.

        Raises:
            ValueError: it is of another quantity.
        """
        if quantity != self.quantity:
            raise ValueError(f"this detector reads {quantity!r}, but the statistic is of {self.quantity!r}")
        return self.values, self.quantity
