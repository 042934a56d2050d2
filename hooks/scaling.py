"""`scale_attention` scales the attention to chosen keys; `zero_value` sets chosen value vectors to zero."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import is_real, store_plain_numbers
from dlm_lens.attention import Hook, PointContext, Site, Stage, rows_of_one
from dlm_lens.hooks.base import call_of, makes_hook
from dlm_lens.hooks.positions import (
    GivenPositions,
    Position,
    PositionClass,
    Positions,
    printed_call,
    read_positions,
    spread,
    where,
)
from dlm_lens.printable import shown


@dataclass(frozen=True)
class ScaleAttention(Hook):
    """Multiply the attention to chosen keys; build it with `scale_attention`.

    Raises:
        ValueError: an invalid position, factor or stage.
    """

    positions: Positions
    factor: float
    stage: Stage = "before_softmax"
    renormalise: bool = False

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        object.__setattr__(self, "positions", read_positions(self.positions, "scale_attention"))
        if not (is_real(self.factor) and self.factor > 0):
            raise ValueError(
                f"scale_attention: factor is {shown(self.factor)}; it must be above 0 (mask_positions hides)"
            )
        if self.stage not in ("before_softmax", "after"):
            raise ValueError(f"scale_attention: stage is {self.stage!r}; 'before_softmax' or 'after'")

    def __repr__(self) -> str:
        more = [f"factor={self.factor}", f"stage={self.stage!r}", *(["renormalise=True"] * self.renormalise)]
        return printed_call("scale_attention", None, self.positions, *more)

    @property
    def site(self) -> Site:
        """`scores` before the softmax, `pattern` after it."""
        return "scores" if self.stage == "before_softmax" else "pattern"

    def edit(
        self, tensor: Float[Tensor, "batch head query key"], hook: PointContext
    ) -> Float[Tensor, "batch head query key"]:
        """Return the scores plus ln(factor), or the pattern times factor, in the columns of the keys.

        Raises:
            ValueError: a position that does not exist, a class outside a run, or `sink(i)` in a bare call.
        """
        # Positions address the key axis; one head and query stand for all.
        keys = where(self.positions, tensor[:, 0, 0], hook, self)[:, None, None, :]
        if self.stage == "before_softmax":
            hidden = tensor <= torch.finfo(tensor.dtype).min / 2
            return torch.where(keys & ~hidden, tensor + math.log(self.factor), tensor)
        # In float32, where a small factor does not make entries 0 before they are normalised.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if self.renormalise else tensor
        scaled = torch.where(keys, wide * self.factor, wide)
        return rows_of_one(scaled).to(tensor.dtype) if self.renormalise else scaled


@makes_hook
def scale_attention(
    positions: GivenPositions,
    factor: float,
    *,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
) -> ScaleAttention:
    """Multiply the attention from every query to some keys by `factor`.

    Before the softmax s_ij becomes s_ij + ln f: the odds of the keys change by the factor f, and the softmax
    normalises them. After the softmax A_ij becomes f A_ij, and rows no longer sum to what they summed to; with
    `renormalise` they sum to 1, and the result equals that of scaling before a standard softmax. An off-by-one
    softmax, or one with sink logits, keeps a share for no key, which `renormalise` gives to the keys. The pattern
    is materialised.

    Args:
        positions: canvas positions, `sink(i)`, `by_row`, or "masked", "visible", "prompt", "answer" (at the
            current step).
        factor: above 0; 1 changes nothing.
        stage: "before_softmax" or "after".
        renormalise: with "after", rows sum to 1 again.

    Raises:
        ValueError: an unknown class or stage, no position, or a factor that is not positive.
    """
    return ScaleAttention(positions, factor, stage, renormalise)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ZeroValue(Hook):
    """Set value vectors to zero; build it with `zero_value`.

    Raises:
        ValueError: an invalid position, or none.
    """

    positions: Positions

    site: Site = "v"

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        object.__setattr__(self, "positions", read_positions(self.positions, "zero_value"))
        if self.positions is None:
            raise ValueError("zero_value needs positions: canvas positions, sink(i), or a class such as 'masked'")

    def __repr__(self) -> str:
        return call_of(self, "zero_value", ("positions",))

    def edit(
        self, tensor: Float[Tensor, "batch position kv_head d_head"], hook: PointContext
    ) -> Float[Tensor, "batch position kv_head d_head"]:
        """Return the values with zeros at the positions.

        Raises:
            ValueError: a position that does not exist, a class outside a run, or `sink(i)` in a bare call.
        """
        return tensor.masked_fill(spread(where(self.positions, tensor, hook, self), tensor), 0.0)


@makes_hook
def zero_value(*positions: Position | PositionClass) -> ZeroValue:
    """Set the value vectors of some positions to zero: they receive attention and add nothing to the output.

    "One Token Is Enough" does this to its sink token in every layer. Here it applies to any position; for some
    layers only, use `at_layers(zero_value(sink(0)), [3])`.

    Args:
        *positions: canvas positions, `sink(i)`, `by_row`, or one of "masked", "visible", "prompt", "answer".

    Raises:
        ValueError: no position, an unknown class, or a class beside positions.
    """
    given = positions[0] if len(positions) == 1 and isinstance(positions[0], str) else positions
    return ZeroValue(given)  # type: ignore[arg-type]
