"""`steer_along`: move an activation along a curve that states follow in the course of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import FINITE, is_real, store_plain_numbers
from dlm_lens.attention import Hook, PointContext, RunStep, run_of
from dlm_lens.hooks.base import makes_hook
from dlm_lens.hooks.positions import (
    ActivationSite,
    GivenPositions,
    Positions,
    activation_site,
    all_finite,
    printed_call,
    read_positions,
    shown_tensor,
    spread,
    where,
)
from dlm_lens.placement import in_float64

Axis = Literal["time", "progress"]
"""What a curve is over: t / T of step t of T, or the share of a row's answer that is decided."""


@dataclass(frozen=True, eq=False)
class SteerAlong(Hook):
    """Move an activation along a curve; build it with `steer_along`.

    Raises:
        ValueError: an invalid curve, knot, axis, site or position.
    """

    curve: Float[Tensor, "knot d_model"]
    knots: tuple[float, ...]
    by: float
    over: Axis = "time"
    site: ActivationSite = "resid"
    positions: Positions = "open"

    padding_safe, remembers = True, False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        activation_site(self.site, "steer_along")
        object.__setattr__(self, "positions", read_positions(self.positions, "steer_along"))
        object.__setattr__(self, "knots", tuple(map(float, self.knots)))
        curve: Any = self.curve
        if not isinstance(curve, Tensor) or curve.ndim != 2 or not all_finite(curve):
            raise ValueError(f"steer_along: curve is {curve!r:.60}; give a finite tensor [knot, d_model]")
        rising = all(one < other for one, other in pairwise(self.knots))
        if len(self.knots) != len(curve) or len(curve) < 2 or not rising:
            raise ValueError(
                f"steer_along: {len(self.knots)} knots for a curve of {len(curve)} points; give each of at least "
                "two points a number, in rising order"
            )
        if not is_real(self.by):
            raise ValueError(f"steer_along: by is {self.by!r}; it must be {FINITE}")
        if self.over not in get_args(Axis):
            raise ValueError(f"steer_along: over is {self.over!r}; it must be 'time' or 'progress'")

    def __repr__(self) -> str:
        curve = f"curve={shown_tensor(self.curve)}"
        return printed_call("steer_along", self.site, self.positions, curve, f"by={self.by}", f"over={self.over!r}")

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the activation plus curve(s + by) - curve(s) at the positions, s the row's place on the axis.

        Raises:
            ValueError: a call outside a run, a position that does not exist, or a curve of another width.
        """
        if self.curve.shape[-1] != tensor.shape[-1] or tensor.ndim != 3:
            raise ValueError(
                f"{self}: {self.site} has {list(tensor.shape[2:])} features a position, the curve "
                f"{self.curve.shape[-1]}"
            )
        run = run_of(hook, self).for_rows(len(tensor))
        key = ("curve", id(self), tensor.device, tensor.dtype)
        added: Tensor = run.once(key, lambda: self.added(self._places(run)).to(tensor))
        chosen = spread(where(self.positions, tensor, hook, self), tensor)
        return torch.where(chosen, tensor + added[:, None], tensor)

    def added(self, places: Float[Tensor, "row"]) -> Float[Tensor, "row d_model"]:
        """What is added at places on the axis: curve(s + by) - curve(s), in float64."""
        return self.at(places + self.by) - self.at(places)

    def at(self, places: Float[Tensor, "row"]) -> Float[Tensor, "row d_model"]:
        """The curve at places on the axis: straight between knots, constant outside them; in float64."""
        knots, curve = torch.tensor(self.knots, dtype=torch.float64), in_float64(self.curve).cpu()
        places = in_float64(places).cpu().clamp(knots[0], knots[-1])
        after = torch.searchsorted(knots, places).clamp(1, len(knots) - 1)
        share = ((places - knots[after - 1]) / (knots[after] - knots[after - 1]))[:, None]
        return (1 - share) * curve[after - 1] + share * curve[after]

    def _places(self, run: RunStep) -> Float[Tensor, "row"]:
        if self.over == "progress":
            return run.progress
        return torch.full((len(run.tokens),), run.step / run.total, dtype=torch.float64)


@makes_hook
def steer_along(
    curve: Float[Tensor, "knot d_model"],
    knots: Sequence[float],
    by: float,
    *,
    over: Axis = "time",
    site: ActivationSite = "resid",
    positions: GivenPositions = "open",
) -> SteerAlong:
    """Add curve(s + by) - curve(s) to an activation, where s is how far the row is at the step.

    With the mean states of each time as the curve it is the steering of 2607.01774: h + mu(t') - mu(t), t' = t +
    `by`. The curve is straight between its knots and constant outside them, so that a row near the end is moved to
    the end at most.

    Args:
        curve: points on the curve.
        knots: where on the axis each point is, rising.
        by: how far to move, on the axis; negative for back.
        over: the axis: "time", t / T of step t of the T that are planned (rows that end earlier, by their text or a
            threshold, have fewer), or "progress", the share of the row's answer that is decided.
        site: "resid" (the residual stream after a block), "attn_out" or "mlp_out".
        positions: canvas positions, `sink(i)`, `by_row`, or "open", "decided", "prompt", "answer"; None for all.

    Raises:
        ValueError: a curve or knots of another form, or an unknown axis, site or class.
    """
    return SteerAlong(curve, tuple(knots), by, over, site, positions)  # type: ignore[arg-type]
