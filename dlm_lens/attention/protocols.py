"""What an intervention looks like to the rooms that run it."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from dlm_lens.attention.layout import SinkLayout

Site = Literal["q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "resid"]
"""Where a hook belongs: a hook point of attention, or the residual stream."""


class HookContext(Protocol):
    """What a hook is told of the place it is called at; TransformerLens's HookPoint has `name` and `layer()`.

    `sinks` says where the network's learned sink tokens stand around the canvas.
    """

    @property
    def name(self) -> str | None:
        """The hook point, by TransformerLens's name."""
        ...

    @property
    def sinks(self) -> SinkLayout:
        """Where canvas and sinks lie."""
        ...

    def layer(self) -> int:
        """Index of the layer."""
        ...


class RunContext(HookContext, Protocol):
    """What a denoising run tells a hook on top.

    `step` counts denoising steps from the most masked canvas, `tokens` is the canvas `[batch, position]`,
    `masked` says which of its positions are still masked, `valid` which are content rather than padding.
    """

    step: int
    tokens: Tensor
    masked: Tensor
    valid: Tensor


@runtime_checkable
class Hook(Protocol):
    """An intervention on one activation: a small frozen value, callable with TransformerLens's signature.

    It returns the new tensor and never edits its argument in place. What it needs to know of the run arrives
    in `hook`; its own fields are settings only.
    """

    @property
    def site(self) -> Site:
        """The hook point that the intervention belongs at."""
        ...

    def __call__(self, tensor: Tensor, hook: HookContext | None = None) -> Tensor:
        """Return the edited activation."""
        ...


@dataclass(frozen=True)
class ColumnEdit:
    """An intervention on attention columns as declared data, for attention that keeps no pattern.

    Hide the given `keys`, or the `k` keys that receive most, from every query; a query keeps its own
    position, so that no row becomes empty. `per` says over what the ranking for `k` is taken.

    Raises:
        ValueError: not exactly one of `keys` and `k` is given.
    """

    site: Literal["scores", "pattern"]
    keys: Bool[Tensor, "batch #head key"] | None = None
    k: int | None = None
    per: Literal["head", "layer", "model"] = "head"

    def __post_init__(self) -> None:
        if (self.keys is None) == (self.k is None):
            raise ValueError("a ColumnEdit takes either keys (a mask) or k (how many of the top), not both or none")
