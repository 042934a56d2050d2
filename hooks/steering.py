"""`steer` adds a direction to an activation; `splice` passes it through a module such as a sparse autoencoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import is_real, store_plain_numbers
from dlm_lens.attention import Hook, PointContext
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
from dlm_lens.hooks.schedules import Schedule, check_schedule, shown_schedule, spread_weights, weights_of
from dlm_lens.printable import one_line, shown


@dataclass(frozen=True, eq=False)
class Steer(Hook):
    """Add a direction; build it with `steer`.

    Raises:
        ValueError: an invalid site, position, direction or schedule.
    """

    direction: Float[Tensor, "*features"]
    scale: float
    site: ActivationSite = "resid"
    positions: Positions = None
    schedule: Schedule = None

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        activation_site(self.site, "steer")
        check_schedule(self.schedule, "steer")
        object.__setattr__(self, "positions", read_positions(self.positions, "steer"))
        if not isinstance(self.direction, Tensor) or self.direction.ndim not in (1, 2):
            raise ValueError(
                f"steer: direction is {shown(self.direction)}; give a tensor [d_model] or [head, d_head] "
                "(torch.from_numpy makes one of an array)"
            )
        if not is_real(self.scale):
            raise ValueError(f"steer: scale is {shown(self.scale)}; it must be a finite number")
        if not all_finite(self.direction):
            raise ValueError("steer: the direction is not finite")

    def __repr__(self) -> str:
        direction = f"direction={shown_tensor(self.direction)}"
        more = [] if self.schedule is None else [f"schedule={shown_schedule(self.schedule)}"]
        return printed_call("steer", self.site, self.positions, direction, f"scale={self.scale}", *more)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the activation plus scale times weight times direction at the positions.

        Raises:
            ValueError: a position that does not exist, a class or a schedule over progress outside a run, or a
                direction of another width.
        """
        features, given = tensor.shape[2:], self.direction.shape
        if given[-1] != features[-1] or (len(given) > 1 and given != features):
            raise ValueError(f"{self}: {self.site} has {list(features)} features a position")
        added = self._added(tensor, hook)
        if self.schedule is not None:
            weights = weights_of(self.schedule, tensor, hook, self)
            if not any(weights):
                return tensor
            added = spread_weights(weights, tensor, hook) * added
        return torch.where(spread(where(self.positions, tensor, hook, self), tensor), tensor + added, tensor)

    def _added(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """What is added, in the activation's dtype on its device; in a run it is copied there once a step."""
        run = hook.run
        if run is None or self.direction.device == tensor.device:
            return self._scaled(tensor.dtype).to(tensor)
        moved: Tensor = run.once(
            ("direction", id(self), tensor.device, tensor.dtype), lambda: self._scaled(tensor.dtype).to(tensor)
        )
        return moved

    def _scaled(self, dtype: torch.dtype) -> Tensor:
        """The scaled direction, at least in float32: in float16 a small one would be 0 before, a large one inf."""
        wide = torch.promote_types(torch.promote_types(self.direction.dtype, dtype), torch.float32)
        return self.scale * self.direction.to(wide)


@makes_hook
def steer(
    direction: Float[Tensor, "*features"],
    scale: float = 1.0,
    *,
    site: ActivationSite = "resid",
    positions: GivenPositions = None,
    schedule: Schedule = None,
) -> Steer:
    """Add `scale * w * direction` to an activation, without normalising the direction.

    Args:
        direction: [d_model] for "resid", "attn_out" and "mlp_out"; [d_head] or [head, d_head] for heads.
        scale: the factor.
        site: "resid" (the residual stream after a block), "attn_out", "mlp_out", "q", "k", "v" or "z".
        positions: canvas positions, `sink(i)`, `by_row`, or "masked", "visible", "prompt", "answer"; None for all.
        schedule: w as a function of a row's progress, the share of the answer that is decided (in an AR run, step /
            total): a function, (lo, hi) for a straight line, a number, or None for 1.

    Raises:
        ValueError: an unknown site or class, a direction that is not a finite tensor of 1 or 2 axes, a scale that
            is no finite number, or an invalid schedule.
    """
    return Steer(direction, scale, site, positions, schedule)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Splice(Hook):
    """Pass an activation through a module; build it with `splice`.

    Raises:
        ValueError: an invalid site, position, module or schedule.
    """

    module: Callable[[Tensor], Tensor]
    site: ActivationSite = "resid"
    schedule: Schedule = None
    positions: Positions = None

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        activation_site(self.site, "splice")
        object.__setattr__(self, "positions", read_positions(self.positions, "splice"))
        if not callable(self.module):
            raise ValueError(
                f"splice: {self.module!r} cannot be called; give a module from activation to activation"
            )
        check_schedule(self.schedule, "splice")

    def __repr__(self) -> str:
        name = getattr(self.module, "__name__", type(self.module).__name__)
        schedule = f"schedule={shown_schedule(self.schedule)}"
        return printed_call("splice", self.site, self.positions, f"module={name}", schedule)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return (1 - w) x + w module(x) at the positions.

        Raises:
            ValueError: a position that does not exist; a class or a schedule over progress outside a run; a module
                whose output has another shape.
        """
        shares = weights_of(self.schedule, tensor, hook, self)
        if not any(shares):
            return tensor
        weights = spread_weights(shares, tensor, hook)
        found = self._of_module(tensor)
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{self}: the module returned {kind}; it must return {list(tensor.shape)}")
        mixed = (1 - weights) * tensor + weights * found.to(tensor)
        return torch.where(spread(where(self.positions, tensor, hook, self), tensor), mixed, tensor)

    def _of_module(self, tensor: Tensor) -> Any:
        """What the module returns.

        Raises:
            ValueError: it does not take an activation of this shape, as far as torch says.
        """
        try:
            return self.module(tensor)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"{self}: the module failed on {self.site} of shape {list(tensor.shape)}, {one_line(error)}; give "
                "one that takes and returns this shape"
            ) from error


@makes_hook
def splice(
    module: Callable[[Tensor], Tensor],
    *,
    site: ActivationSite = "resid",
    schedule: Schedule = None,
    positions: GivenPositions = None,
) -> Splice:
    """Replace an activation x by (1 - w) x + w module(x), where the weight w may depend on the run's progress.

    Args:
        module: from [batch, position, ...] to the same shape: a sparse autoencoder, a projection, a function. It
            must be on the model's device; its output is cast to the activation's dtype.
        site: "resid" (the residual stream after a block), "attn_out", "mlp_out", "q", "k", "v" or "z".
        schedule: w as a function of a row's progress, the share of the answer that is decided (in an AR run, step /
            total): a function, (lo, hi) for a straight line, a number, or None for 1.
        positions: canvas positions, `sink(i)`, `by_row`, or "masked", "visible", "prompt", "answer"; None for all.

    Raises:
        ValueError: an unknown site or class, a module that cannot be called, or an invalid schedule.
    """
    return Splice(module, site, schedule, positions)  # type: ignore[arg-type]
