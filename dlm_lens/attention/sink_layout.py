"""Learned sink tokens: their positions around the canvas, and which keys they see."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Placement = Literal["front", "end"]


@dataclass(frozen=True)
class SinkToken:
    """The address of a learned sink token; build it with `sink`."""

    index: int

    def __repr__(self) -> str:
        return f"sink({self.index})"


def sink(index: int) -> SinkToken:
    """Address learned sink token `index` (from 0) wherever a position is accepted.

    Raises:
        ValueError: not an integer, or a negative one.
    """
    if not isinstance(index, int) or index < 0:
        raise ValueError(f"sink({index!r}): sinks are counted from 0; give a whole number")
    return SinkToken(index)


def beside_sinks(canvas: Shaped[Tensor, "*axes position"], count: int, value: bool | None = None) -> Tensor:
    """A tensor over canvas positions in the order of results, [*axes, key]: the learned sink tokens come last.

    Args:
        canvas: over the canvas positions.
        count: of sink tokens; without any the canvas is returned as it is.
        value: of every sink; None for token ids, of which sink i has -1 - i.
    """
    if not count:
        return canvas
    ids = -1 - torch.arange(count, device=canvas.device)
    at_sinks = ids if value is None else torch.full_like(ids, value)
    return torch.cat([canvas, at_sinks.to(canvas.dtype).expand(*canvas.shape[:-1], count)], -1)


@dataclass(frozen=True)
class SinkLayout:
    """`count` sink tokens before or after a canvas of S positions; the network sees S + count.

    Users count positions of the canvas alone; `canvas` and `sinks` are their positions inside the network.

    Raises:
        ValueError: a negative count or an unknown placement.
    """

    count: int = 0
    placement: Placement = "front"

    def __post_init__(self) -> None:
        if self.count < 0 or self.placement not in ("front", "end"):
            raise ValueError(
                f"{self.count} sink tokens at {self.placement!r}: give 0 or more, and the place 'front' or 'end'"
            )

    @classmethod
    def of(cls, model: Any) -> "SinkLayout":
        """The layout of a model; no sinks for families that have none."""
        config = model.config
        return cls(getattr(config, "num_sinks", 0), getattr(config, "sink_placement", "front"))

    def canvas(self, length: int) -> slice:
        """The canvas among `length` positions of the network."""
        return slice(self.count, length) if self.placement == "front" else slice(0, length - self.count)

    def sinks(self, length: int) -> slice:
        """The sinks among `length` positions of the network."""
        return slice(0, self.count) if self.placement == "front" else slice(length - self.count, length)

    def locate(self, position: int | SinkToken, length: int) -> int:
        """Index of a canvas position (negative: from the canvas's end) or of a sink among `length` positions.

        Raises:
            ValueError: the canvas has no such position, or the model no such sink.
        """
        part = self.sinks(length) if isinstance(position, SinkToken) else self.canvas(length)
        index, size = position.index if isinstance(position, SinkToken) else position, part.stop - part.start
        if not -size <= index < size:
            what = f"{self.count} sink tokens" if isinstance(position, SinkToken) else f"{size} canvas positions"
            raise ValueError(f"position {position!r} is not there; the model has {what}")
        return int(range(part.start, part.stop)[index])

    def sinks_last(self, tensor: Tensor, axis: int = -1) -> Tensor:
        """A tensor over the network's positions in the order of results: canvas, then learned sinks.

        An axis of size 1 broadcasts over positions and is returned as it is.
        """
        length = tensor.shape[axis]
        if not self.count or self.placement == "end" or length == 1:
            return tensor
        parts = (self.canvas(length), self.sinks(length))
        return torch.cat([tensor.narrow(axis, part.start, part.stop - part.start) for part in parts], axis)

    def surround(self, canvas: Tensor, sinks: Tensor) -> Tensor:
        """[batch, S, ...] of the canvas and [batch, count, ...] of the sinks, concatenated as in the network."""
        return torch.cat([sinks, canvas] if self.placement == "front" else [canvas, sinks], 1)

    def is_sink(self, length: int, device: torch.device) -> Bool[Tensor, "position"]:
        """True at the sinks, for `length` positions of the network."""
        flags = torch.zeros(length, dtype=torch.bool, device=device)
        flags[self.sinks(length)] = True
        return flags

    def widen(self, mask: Tensor) -> Tensor:
        """A mask of the canvas, `[batch, S]` or `[batch, heads, S, S]`, with the sinks visible to every query.

        1, True or (additive) 0.0 mean visible; the rows of the sinks themselves are restricted by `restrict`.
        """
        visible = 0.0 if mask.is_floating_point() and mask.ndim == 4 else 1
        sides = (self.count, 0) if self.placement == "front" else (0, self.count)
        padding = sides * (2 if mask.ndim == 4 else 1)
        if mask.dtype == torch.bool:
            return torch.nn.functional.pad(mask.byte(), padding, value=visible).bool()
        return torch.nn.functional.pad(mask, padding, value=visible)

    def position_ids(self, canvas: Int[Tensor, "batch canvas"]) -> Int[Tensor, "batch position"]:
        """Rotary positions: sinks before the canvas take 0, ..., count - 1 and shift it; those after it continue.

        They continue from the row's own last position, so that a padded row gets what it gets alone.
        """
        index = torch.arange(self.count, device=canvas.device).expand(canvas.shape[0], -1)
        if self.placement == "front":
            return self.surround(canvas + self.count, index)
        return self.surround(canvas, canvas.amax(-1, keepdim=True) + 1 + index)

    def restrict(
        self, mask: Tensor | None, length: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query position"] | Float[Tensor, "#batch #head query position"]:
        """Visibility with sinks: each sees only itself (Eq. 6 of "One Token Is Enough"), others what `mask` allows.

        `mask` is boolean or additive over all `length` positions of the network, or None where all is visible.
        """
        itself = torch.eye(length, dtype=torch.bool, device=device)
        rows = self.is_sink(length, device)[:, None]
        if mask is None:
            return torch.where(rows, itself, True)[None, None]
        if mask.dtype == torch.bool:
            return torch.where(rows, itself, mask)
        hidden = torch.zeros(length, length, dtype=mask.dtype, device=device)
        return torch.where(rows, hidden.masked_fill(~itself, torch.finfo(mask.dtype).min), mask)
