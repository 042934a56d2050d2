"""`keep_only`: every query sees the sinks and a window of positions, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.arguments import plain_number, store_plain_numbers
from dlm_lens.attention import (
    ColumnHook,
    ColumnMask,
    ColumnStats,
    DelegatingColumnHook,
    HidesNothing,
    PointContext,
    SinkLayout,
    Stage,
)
from dlm_lens.hooks.base import check_stage, makes_hook
from dlm_lens.hooks.position_masking import MaskPositions
from dlm_lens.hooks.positions import Position
from dlm_lens.hooks.sink_masking import MaskSinks, mask_sinks
from dlm_lens.sinks import Detector, TopK


@dataclass(frozen=True, repr=False)
class KeptPositions(MaskPositions):
    """The positions of a `keep_only`, which its errors name in place of `mask_positions`."""

    _maker: ClassVar[str] = "keep_only"

    def __repr__(self) -> str:
        return self._call_with(", ".join(map(repr, self.positions)))

    def _call_with(self, positions: str) -> str:
        """The call that has these positions, for errors."""
        return f"{self._maker}([{positions}])"


@dataclass(frozen=True, repr=False)
class KeepOnly(DelegatingColumnHook):
    """Hide everything but sinks and a window; build it with `keep_only`.

    Raises:
        ValueError: an empty window, or a negative `ahead`.
    """

    sinks: MaskSinks | MaskPositions | None
    window: int
    ahead: int | None = None
    stage: Stage = "before_softmax"
    renormalise: bool = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_stage(self.stage, self.renormalise)
        for name, value, least in (("window", self.window, 1), ("ahead", self.ahead, 0)):
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
            if wrong and (name, value) != ("ahead", None):
                raise ValueError(f"keep_only({name}={value!r}): it must be a whole number of at least {least}")

    def __repr__(self) -> str:
        kept = "()" if self.sinks is None else _inside(self.sinks)
        parts = [kept, f"window={self.window}"] + [f"ahead={self.ahead}"] * (self.ahead is not None)
        parts += [f"stage={self.stage!r}"] * (self.stage == "after") + ["renormalise=True"] * self.renormalise
        return f"keep_only({', '.join(parts)})"

    @property
    def inner(self) -> ColumnHook:
        """The hook that finds the sinks; the window is relative to the query."""
        return HidesNothing() if self.sinks is None else self.sinks

    site = ColumnHook.site

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask:
        """All columns but the sinks; every query keeps those in its window."""
        found = self.inner.hidden(keys, columns, hook)
        device = None if hook.run is None else hook.run.tokens.device
        gone = torch.ones(1, 1, keys, dtype=torch.bool, device=device) if found is None else ~found.columns
        keep = partial(in_window, window=self.window, ahead=self.ahead, layout=hook.sinks)
        return ColumnMask(gone, self.stage, renormalise=self.renormalise, keep=keep)


def in_window(
    own: Int[Tensor, "query"], keys: int, *, window: int, ahead: int | None, layout: SinkLayout
) -> Bool[Tensor, "query key"]:
    """Whether key j is in query i's window, i - window < j <= i + ahead; a sink token is only in its own."""
    key = torch.arange(keys, device=own.device)
    distance = key - own[:, None]
    near = (distance > -window) & (distance <= (keys if ahead is None else ahead))
    sink = layout.is_sink(keys, own.device)
    return near & ~(sink | sink[own][:, None]) | (distance == 0)


def _inside(sinks: MaskSinks | MaskPositions) -> str:
    if isinstance(sinks, MaskPositions):
        return repr(list(sinks.positions))
    return repr(sinks).removeprefix("mask_sinks(").removesuffix(")")


@makes_hook
def keep_only(
    sinks: Detector | str | int | Sequence[Position] = (),
    window: int = 64,
    *,
    ahead: int | None = None,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    **settings: Any,
) -> KeepOnly:
    """Hide everything from each query but the sinks and a window of positions.

    Query i sees key j if j is a sink or i - window < j <= i + ahead. In an AR model this is StreamingLLM
    (2309.17453): sinks and the last `window` positions, including the query's own. In a bidirectional model all
    later positions stay visible by default, so that only the past context is discarded (2510.15731, section 5.3). A
    learned sink token is in no window but its own: give it as `sink(i)`, or let the detector find it.

    Args:
        sinks: a detector (or its text), a number k (the k strongest), or positions; () for a window alone.
        window: number of positions up to the query's own, which counts.
        ahead: number of positions after the query's own; None for all, 0 for none.
        stage: "before_softmax" or "after".
        renormalise: with "after", rows sum to 1 again.
        **settings: of `mask_sinks`, for a detector or a number: top, per, source, relative, classes.

    Raises:
        ValueError: settings that contradict each other.
    """
    kept: MaskSinks | MaskPositions | None
    sinks = plain_number(sinks)
    if isinstance(sinks, Sequence) and not isinstance(sinks, str):
        if settings:
            raise ValueError(f"{', '.join(settings)}: only for a detector or a number; these sinks are positions")
        kept = KeptPositions(tuple(sinks)) if sinks else None
    else:
        kept = mask_sinks(TopK(sinks) if isinstance(sinks, int) else sinks, **settings)
    return KeepOnly(kept, window, ahead, stage, renormalise)
