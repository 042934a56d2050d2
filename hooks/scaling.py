"""Scale the attention that chosen keys receive, and set chosen values to zero."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import Hook, PointContext, SinkToken, Site, Stage
from dlm_lens.hooks.positions import PositionClass, Positions, printed_call, read_positions, spread, where


@dataclass(frozen=True)
class ScaleAttention(Hook):
    """Multiply the attention to chosen keys; build it with `scale_attention`.

    Raises:
        ValueError: positions, factor or stage that cannot be.
    """

    positions: Positions
    factor: float
    stage: Stage = "before_softmax"
    renormalise: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", read_positions(self.positions, "scale_attention"))
        if not (0 < self.factor < math.inf):
            raise ValueError(f"scale_attention: factor is {self.factor}; it must be above 0 (mask_positions hides)")
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
            ValueError: a position that is not there, a class outside a run, or a sink without a model.
        """
        # One row of keys per canvas: the key axis is what the positions address.
        keys = where(self.positions, tensor[:, 0, 0], hook, self)[:, None, None, :]
        if self.stage == "before_softmax":
            hidden = tensor <= torch.finfo(tensor.dtype).min / 2
            return torch.where(keys & ~hidden, tensor + math.log(self.factor), tensor)
        scaled = torch.where(keys, tensor * self.factor, tensor)
        return scaled / scaled.sum(-1, keepdim=True).clamp(min=1e-30) if self.renormalise else scaled


def scale_attention(
    positions: int | SinkToken | tuple[int | SinkToken, ...] | PositionClass,
    factor: float,
    *,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
) -> ScaleAttention:
    """Multiply the attention that every query pays to some keys by `factor`.

    Before the softmax, exp(s_ij + ln f) / sum_k ...: the odds of the keys change by the factor and rows sum to 1.
    After it, f A_ij: rows sum to something else, unless `renormalise`, which gives the same as before the softmax.
    The pattern is materialised.

    Args:
        positions: canvas positions, `sink(i)`, or "masked", "visible", "prompt", "answer" (of the present step).
        factor: above 0; 1 changes nothing.
        stage: "before_softmax" or "after".
        renormalise: behind the softmax, make rows sum to 1 again.

    Raises:
        ValueError: an unknown class or stage, no position, or a factor that is not positive.
    """
    return ScaleAttention(positions, factor, stage, renormalise)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ZeroValue(Hook):
    """Set value vectors to zero; build it with `zero_value`.

    Raises:
        ValueError: positions that cannot be.
    """

    positions: Positions

    site: Site = "v"

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", read_positions(self.positions, "zero_value"))
        if self.positions is None:
            raise ValueError("zero_value needs positions: canvas positions, sink(i), or a class such as 'masked'")

    def __repr__(self) -> str:
        return printed_call("zero_value", None, self.positions)

    def edit(
        self, tensor: Float[Tensor, "batch position kv_head d_head"], hook: PointContext
    ) -> Float[Tensor, "batch position kv_head d_head"]:
        """Return the values with zeros at the positions.

        Raises:
            ValueError: a position that is not there, a class outside a run, or a sink without a model.
        """
        return tensor.masked_fill(spread(where(self.positions, tensor, hook, self), tensor), 0.0)


def zero_value(*positions: int | SinkToken | PositionClass) -> ZeroValue:
    """Set the value vectors of some positions to zero: they are attended to, and add nothing.

    "One Token Is Enough" forces this on its sink token in every layer; here it goes for any position, and in chosen
    layers with `at_layers(zero_value(sink(0)), [3])`.

    Args:
        *positions: canvas positions, `sink(i)`, or one of "masked", "visible", "prompt", "answer".

    Raises:
        ValueError: no position, an unknown class, or a class beside positions.
    """
    given = positions[0] if len(positions) == 1 and isinstance(positions[0], str) else positions
    return ZeroValue(given)  # type: ignore[arg-type]
