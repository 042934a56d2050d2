"""Hide chosen key positions from every query."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dlm_lens.attention import ColumnMask, ColumnStats, HookContext, SinkLayout, SinkToken, Stage
from dlm_lens.hooks.column_base import HidesColumns, check_stage, written


@dataclass(frozen=True, repr=False)
class MaskPositions(HidesColumns):
    """Hide keys from all queries; build it with `mask_positions`.

    Raises:
        ValueError: no position, or an unknown stage.
    """

    positions: tuple[int | SinkToken, ...]
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False

    def __post_init__(self) -> None:
        check_stage(self.stage, self.renormalise)
        if not self.positions:
            raise ValueError("mask_positions needs at least one position")
        asked: tuple[Any, ...] = self.positions
        for position in asked:
            if isinstance(position, list | tuple | range):
                given = ", ".join(map(repr, position)) if len(position) <= 8 else "*positions"
                raise ValueError(
                    f"mask_positions({position!r:.60}) takes positions one by one: mask_positions({given})"
                )
            if isinstance(position, bool) or not isinstance(position, int | SinkToken):
                raise ValueError(f"mask_positions({position!r}): a position is a whole number or sink(i)")

    def __repr__(self) -> str:
        return written(self, "mask_positions", ("positions",))

    @property
    def stateless(self) -> bool:
        """Yes: the positions are settings."""
        return True

    @property
    def padding_safe(self) -> bool:
        """Where the positions are sink tokens or counted from the end, which padding on the left does not shift."""
        return all(isinstance(position, SinkToken) or position < 0 for position in self.positions)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: HookContext | None) -> ColumnMask:
        """The columns at the positions, in every row and head."""
        layout: SinkLayout | None = getattr(hook, "sinks", None)
        if layout is None and any(isinstance(position, SinkToken) for position in self.positions):
            raise ValueError(
                f"{self}: the position of a sink depends on the model; use dlm_lens.hooks.attach_hooks(model, ...)"
            )
        run = getattr(hook, "run", None)
        hidden = torch.zeros(1, 1, keys, dtype=torch.bool, device=None if run is None else run.tokens.device)
        for position in self.positions:
            place = (layout or SinkLayout()).locate(position, keys)
            hidden[..., place : place + 1] = True
        return ColumnMask(hidden, self.stage, self.keep_self, self.renormalise, most=len(self.positions))


def mask_positions(
    *positions: int | SinkToken,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
) -> MaskPositions:
    """Hide the keys at `positions` (canvas positions, negative from the end, or `sink(0)`) from every query.

    Before the softmax the other keys take over the attention; after it, the rows lose it and sum to less than
    1, unless `renormalise`. A row that would end empty keeps its own position; with `keep_self` every row does.

    Raises:
        ValueError: no position, or an unknown stage.
    """
    return MaskPositions(positions, stage, renormalise, keep_self)
