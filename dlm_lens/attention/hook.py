"""What an intervention looks like to the rooms that run it."""

from collections.abc import Callable
from typing import Literal, Protocol, get_args, runtime_checkable

from torch import Tensor

from dlm_lens.attention.column_masking import ColumnMask, ColumnStats

Site = Literal["q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "attn_out", "mlp_out", "resid"]
"""Where a hook belongs: a hook point of attention, what attention or MLP add to the residual stream, or the
residual stream behind a block."""

SITES: tuple[Site, ...] = get_args(Site)


class HookContext(Protocol):
    """What a hook is told of the place it is called at; TransformerLens's HookPoint has `name` and `layer()`.

    `PointContext` also has `sinks` (where the network's learned sink tokens stand) and `run` (the `RunStep`).
    """

    @property
    def name(self) -> str | None:
        """The point, by TransformerLens's name."""
        ...

    def layer(self) -> int:
        """Index of the layer."""
        ...


@runtime_checkable
class Hook(Protocol):
    """An intervention on one activation: a small frozen value, callable with TransformerLens's signature.

    It returns the new tensor and never edits its argument in place. What it needs to know of the run arrives
    in `hook`; its own fields are settings only. A hook may declare `layers`, the only layers that it acts in.
    """

    @property
    def site(self) -> Site:
        """The hook point that the intervention belongs at."""
        ...

    def __call__(self, tensor: Tensor, hook: HookContext | None = None) -> Tensor:
        """Return the edited activation."""
        ...


@runtime_checkable
class ColumnHook(Hook, Protocol):
    """A hook that hides columns of the pattern: attention can run it without a pattern.

    Its call is `hide_columns(self, tensor, hook)`; where nobody reads the pattern, attention asks `hidden` itself,
    with statistics taken in stream, and runs the fused kernel on what is left. The numbers are the same.
    """

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: HookContext | None) -> ColumnMask | None:
        """Which of the `keys` columns to hide in this layer, now; None for none.

        `columns` computes what each key receives, at the cost of a pass over the scores.
        """
        ...
