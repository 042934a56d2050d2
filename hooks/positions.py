"""Hide chosen key positions from every query."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import HookContext, Site

Stage = Literal["before_softmax", "after"]


@dataclass(frozen=True)
class MaskPositions:
    """Hide keys from all queries but their own; build it with `mask_positions`."""

    positions: tuple[int, ...]
    stage: Stage = "before_softmax"

    @property
    def site(self) -> Site:
        """`scores` before the softmax, `pattern` after it."""
        return "scores" if self.stage == "before_softmax" else "pattern"

    def __call__(
        self, tensor: Float[Tensor, "batch head query key"], hook: HookContext | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """Return the scores or the pattern without the hidden columns.

        Raises:
            ValueError: a position lies outside the canvas.
        """
        queries, keys = tensor.shape[-2:]
        for position in self.positions:
            if not -keys <= position < keys:
                raise ValueError(f"mask_positions hides position {position}, but there are {keys} keys")
        hidden = torch.zeros(keys, dtype=torch.bool, device=tensor.device)
        hidden[list(self.positions)] = True
        # With fewer queries than keys (cached decoding) the queries are the last ones.
        own = (
            torch.arange(keys, device=tensor.device)
            == torch.arange(keys - queries, keys, device=tensor.device)[:, None]
        )
        gone = hidden & ~own
        return tensor.masked_fill(gone, torch.finfo(tensor.dtype).min if self.site == "scores" else 0.0)


def mask_positions(*positions: int, stage: Stage = "before_softmax") -> MaskPositions:
    """Hide the keys at `positions` (canvas positions, negative from the end) from every query.

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
