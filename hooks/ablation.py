"""`ablate`: replace an activation by zero, by its mean, or by a given tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlm_lens.arguments import listed_indices
from dlm_lens.attention import Hook, PointContext, run_of
from dlm_lens.hooks.activation_means import MeanActivations, bins_of, classes_of
from dlm_lens.hooks.base import makes_hook
from dlm_lens.hooks.positions import (
    ActivationSite,
    GivenPositions,
    Positions,
    activation_site,
    printed_call,
    read_positions,
    run_rows,
    shown_tensor,
    spread,
    where,
)


@dataclass(frozen=True, eq=False)
class Ablate(Hook):
    """Replace an activation; build it with `ablate`.

    Raises:
        ValueError: an invalid site, position, value or dimension.
    """

    site: ActivationSite
    positions: Positions = None
    value: Literal["zero"] | MeanActivations | Tensor = "zero"
    dims: tuple[int, ...] | None = None

    remembers = False

    def __post_init__(self) -> None:
        activation_site(self.site, "ablate")
        object.__setattr__(self, "positions", read_positions(self.positions, "ablate"))
        object.__setattr__(self, "value", _read_value(self.value, self.site))
        if self.dims is not None:
            dims = listed_indices("dim", self.dims, "ablate: ")
            if not dims:
                raise ValueError(f"ablate: dims is {self.dims!r}; give indices of the activation's last axis")
            object.__setattr__(self, "dims", dims)

    def __repr__(self) -> str:
        value = shown_tensor(self.value) if isinstance(self.value, Tensor) else repr(self.value)
        more = [f"value={value}", *([] if self.dims is None else [f"dims={self.dims}"])]
        return printed_call("ablate", self.site, self.positions, *more)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the activation with the value at the positions (and in the dimensions `dims`).

        Raises:
            ValueError: a position, dimension or layer that does not exist; a class or a mean outside a run.
        """
        chosen = spread(where(self.positions, tensor, hook, self), tensor)
        if self.dims is not None:
            width = tensor.shape[-1]
            if not all(-width <= dim < width for dim in self.dims):
                raise ValueError(f"{self}: dims go from 0 to {width - 1}, or from -{width} to -1")
            picked = torch.zeros(width, dtype=torch.bool, device=tensor.device)
            picked[list(self.dims)] = True
            chosen = chosen & picked
        if isinstance(self.value, str):
            return tensor.masked_fill(chosen, 0.0)
        return torch.where(chosen, self._replacement(self.value, tensor, hook), tensor)

    def _replacement(self, value: MeanActivations | Tensor, tensor: Tensor, hook: PointContext) -> Tensor:
        if isinstance(value, Tensor):
            try:
                return value.to(tensor).expand_as(tensor)
            except RuntimeError:
                raise ValueError(
                    f"ablate: value has shape {list(value.shape)}, which does not fit {self.site} of shape "
                    f"{list(tensor.shape)}"
                ) from None
        run = run_rows(hook, *tensor.shape[:2]) or run_of(hook, self)
        mean = value.at(hook.layer(), classes_of(run, tensor, hook), bins_of(run, value.bins))
        if mean.shape != tensor.shape:
            raise ValueError(
                f"{self}: the means are those of {list(mean.shape[2:])} features a position, and {self.site} has "
                f"{list(tensor.shape[2:])}; measure them on this model"
            )
        return mean.to(tensor)


@makes_hook
def ablate(
    site: ActivationSite,
    positions: GivenPositions = None,
    value: Literal["zero"] | MeanActivations | Tensor | str = "zero",
    *,
    dims: int | Sequence[int] | None = None,
) -> Ablate:
    """Replace an activation at some positions: with zero, its mean, or a tensor.

    With `MeanActivations` every row and position gets the mean of its layer, its class (masked, visible, sink
    token) and the run's progress. Mean ablation keeps what all positions share; zero ablation removes that too.

    Args:
        site: "q", "k", "v", "z" (of every head), "attn_out", "mlp_out" or "resid" (after a block).
        positions: canvas positions, `sink(i)`, `by_row`, "masked", "visible", "prompt" or "answer"; None for all,
            including learned sink tokens. Padding is not changed.
        value: "zero"; a `MeanActivations` (`mean_activations`) or the path of a saved one (".safetensors"); or a
            tensor that broadcasts to the activation, [batch, position, ...].
        dims: only these indices of the last axis, such as the dimensions of massive activations in "resid".

    Raises:
        ValueError: an unknown site, class or value, means of another site, or a file without means.
    """
    return Ablate(site, positions, value, dims)  # type: ignore[arg-type]


def _read_value(value: Any, site: str) -> Literal["zero"] | MeanActivations | Tensor:
    if isinstance(value, str | Path) and str(value).endswith(".safetensors"):
        value = MeanActivations.load(value)
    if isinstance(value, MeanActivations) and value.site != site:
        raise ValueError(f"ablate: the means are of {value.site!r}; they do not fit site {site!r}")
    if isinstance(value, MeanActivations | Tensor):
        return value
    if isinstance(value, str) and value == "zero":
        return "zero"
    raise ValueError(
        f"ablate: value is {value!r:.60}; give 'zero', a tensor, or means: value=mean_activations(model, prompts, "
        f"{site!r})"
    )
