"""One layer and head of a `Received`, one row of the batch: what a two-dimensional picture shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.recording import Recording
from dlm_lens.sinks import Level, Received, Trajectories, received_of


@dataclass(frozen=True)
class Selection:
    """The part of a `Received` that a picture shows; `received` has one row, one layer and one head."""

    received: Received
    layer: int | None
    head: int | None
    row: int

    @property
    def level(self) -> Level:
        """Whose pattern it is."""
        return self.received.level

    @property
    def scores(self) -> Float[Tensor, "step key"]:
        """The scores."""
        return self.received.values[:, 0, 0, 0]

    @property
    def masked(self) -> Bool[Tensor, "step key"] | None:
        """What is masked at each step."""
        return None if self.received.masked is None else self.received.masked[:, 0]

    @property
    def content(self) -> Int[Tensor, "position"]:
        """Canvas positions that are not padding."""
        keys = self.received.values.new_ones(self.received.values.shape[-1])
        return (keys if self.received.valid is None else self.received.valid[0]).nonzero().flatten()

    @property
    def steps(self) -> int:
        """How many steps the row ran: up to the last at which any key has a score; all if none has."""
        defined = (~self.scores.isnan()).any(-1).nonzero()
        return int(defined[-1]) + 1 if len(defined) else len(self.scores)

    @property
    def final(self) -> list[int] | None:
        """Ids after the last step (or what the last step saw), if known."""
        if self.received.final_tokens is not None:
            return [int(i) for i in self.received.final_tokens[0]]
        return None if self.received.tokens is None else [int(i) for i in self.received.tokens[-1, 0]]


def choose(received: Any, layer: int | None, head: int | None, row: int) -> Selection:
    """Pick a head of a layer, the head mean of a layer (head None), or the model mean (both None).

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: a head without its layer, or a layer, head or row that is not there.
    """
    received = as_received(received)
    level = level_of(layer, head)
    received = received.at_level(level)
    layers = slice(0, 1) if layer is None else _slice("layer", layer, received.layers)
    heads = slice(0, 1) if head is None else _slice("head", head, range(received.values.shape[3]))
    rows = _slice("row", row, range(received.values.shape[1]))
    return Selection(received.part(rows, layers, heads), layer, head, row)


def as_received(given: Any) -> Received:
    """A `Received` as it is; of a `Recording` its received attention of all queries.

    Raises:
        TypeError: neither.
        ValueError: a recording without received attention.
    """
    if isinstance(given, Recording):
        return received_of(given)
    if not isinstance(given, Received):
        raise TypeError(
            f"the first argument is a {type(given).__name__}; give a Received (received_over_steps) or a Recording"
        )
    return given


def level_of(layer: int | None, head: int | None) -> Level:
    """The level that a choice of layer and head means.

    Raises:
        ValueError: a head without its layer.
    """
    if layer is None and head is not None:
        raise ValueError(f"head {head} of which layer? give layer=, or neither for the model mean")
    return "model" if layer is None else "layer" if head is None else "head"


def index_of(name: str, wanted: int, there: Sequence[int]) -> int:
    """Where `wanted` is among the indices that are there.

    Raises:
        ValueError: nowhere.
    """
    if wanted not in there:
        raise ValueError(f"{name} {wanted} is not among the {name}s {', '.join(map(str, there)) or '(none)'}")
    return list(there).index(wanted)


def _slice(name: str, wanted: int, there: Sequence[int]) -> slice:
    index = index_of(name, wanted, there)
    return slice(index, index + 1)


def strongest(received: Received) -> tuple[int, int]:
    """Layer and head whose highest score, averaged over steps and sequences, is highest."""
    peak = received.values.nan_to_num(nan=-torch.inf).amax(-1)
    mean = torch.where(peak.isfinite(), peak, torch.nan).nanmean((0, 1)).nan_to_num(nan=-torch.inf)
    layer, head = divmod(int(mean.argmax()), mean.shape[1])
    return received.layers[layer], head


def most_moving(paths: Trajectories, row: int | None = None) -> tuple[int | None, int | None]:
    """Layer and head whose sinks move most often; of equals, the one that has sinks for longest.

    Args:
        paths: from `trajectories`.
        row: in which sequence; None for all.

    Returns:
        None for what the level of the paths averages over.

    Raises:
        ValueError: a row that is not there, or no head has a sink in it.
    """
    table = paths.summary(by="head" if row is None else "pattern")
    if row is not None:
        index_of("row", row, range(paths.main.shape[1]))
        table = table[table["batch"] == row] if "batch" in table else table
    table = table[table["with_sink"] > 0].sort_values(["moves", "with_sink"], ascending=False, kind="stable")
    if table.empty:
        where = "" if row is None else f" in row {row}"
        raise ValueError(
            f"no head has a sink{where} by {paths.rule}; lower the threshold, or name a layer and head to look at"
        )
    best = table.iloc[0]
    return tuple(int(best[name]) if name in table else None for name in ("layer", "head"))  # type: ignore[return-value]
