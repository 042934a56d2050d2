"""Hide chosen key positions from every query."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import HookContext, SinkLayout, SinkToken, Site

Stage = Literal["before_softmax", "after"]


@dataclass(frozen=True)
class MaskPositions:
    """Hide keys from all queries but their own; build it with `mask_positions`."""

    positions: tuple[int | SinkToken, ...]
    stage: Stage = "before_softmax"

    @property
    def site(self) -> Site:
        """`scores` before the softmax, `pattern` after it."""
        return "scores" if self.stage == "before_softmax" else "pattern"

    def __call__(
        self, tensor: Float[Tensor, "batch head query key"], hook: HookContext | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """Return the scores or the pattern without the hidden columns.

        A bare call takes the tensor for a model without sink tokens; `attached` knows the model.

        Raises:
            ValueError: a position lies outside the canvas, or a sink is addressed in a bare call.
        """
        layout = getattr(hook, "sinks", None)
        if layout is None and any(isinstance(position, SinkToken) for position in self.positions):
            raise ValueError(
                f"{self}: where a sink stands depends on the model; run it with dlm_lens.hooks.attached(model, ...)"
            )
        queries, keys = tensor.shape[-2:]
        hidden = torch.zeros(keys, dtype=torch.bool, device=tensor.device)
        for position in self.positions:
            hidden[(layout or SinkLayout()).locate(position, keys)] = True
        # With fewer queries than keys (cached decoding) the queries are the last ones.
        index = torch.arange(keys, device=tensor.device)
        own = index == index[keys - queries :, None]
        return tensor.masked_fill(hidden & ~own, torch.finfo(tensor.dtype).min if self.site == "scores" else 0.0)


def mask_positions(*positions: int | SinkToken, stage: Stage = "before_softmax") -> MaskPositions:
    """Hide the keys at `positions` (canvas positions, negative from the end, or `sink(0)`) from every query.

    Before the softmax the other keys take over the attention; after it, the rows lose it and sum to less than
    1. A query always keeps its own position, so that no row becomes empty.

    Raises:
        ValueError: no position, or an unknown stage.
    """
    if not positions:
        raise ValueError("mask_positions needs at least one position")
    if stage not in ("before_softmax", "after"):
        raise ValueError(f"stage is {stage!r}; it must be 'before_softmax' or 'after'")
    return MaskPositions(tuple(positions), stage)
