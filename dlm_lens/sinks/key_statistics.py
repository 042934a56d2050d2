"""`KeyStatistic`: a number per position from hidden states, the largest activation or the norm of the key."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import padding_before
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks.detectors.base import HiddenQuantity, Quantity
from dlm_lens.sinks.received import AXES, Level, Scale


@dataclass(frozen=True, eq=False)
class KeyStatistic:
    """A statistic of hidden states per position and step, for detectors that read hidden states.

    All five axes are always there; those that are not in `dims` have size 1.

    Args:
        values: the statistic; NaN where a position is undefined (padding, not decoded yet in an AR baseline).
        quantity: "max activation" (no head axis) or "key norm" (for every query head, of the key that it uses).
        median: median over positions and features of |h|, the reference of "max activation"; None for the median of
            `values` over the positions.
        tokens, masked, valid, layers, steps, heads, tokenizer, sinks, final_tokens, row_prompts: as in `Received`.
        dims: the axes that exist.

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
    steps: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    dims: tuple[str, ...] = AXES
    sinks: int = 0
    tokenizer: Any = field(default=None, repr=False)
    final_tokens: Int[Tensor, "batch key"] | None = None
    row_prompts: Int[Tensor, "batch"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.quantity not in ("max activation", "key norm"):
            raise ValueError(f"KeyStatistic.quantity is {self.quantity!r}; 'max activation' or 'key norm'")
        known = {"layer": len(self.layers), "step": len(self.steps), "head": len(self.heads)}
        check_shapes(self, **{axis: size for axis, size in known.items() if size})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(AXES, self.values.shape, strict=True) if n in self.dims)
        return f"KeyStatistic({self.quantity}; {sizes})"

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
