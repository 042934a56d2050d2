"""One layer, head and row of received attention: the part that a two-dimensional picture shows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import INDICES, is_whole, meant, plain_number
from dlm_lens.printable import is_array, shown
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.recording.query_classes import stored_name
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Level, Received, Trajectories, received_of
from dlm_lens.sinks.followed_tokens import received_by_token
from dlm_lens.sinks.key_axes import AXES, Follow, KeyAxes


@dataclass(frozen=True)
class Selection:
    """The part of a `Received` that a picture shows.

    Args:
        received: with one row, one layer and one head.
        layer: index of the layer; None for the mean over layers.
        head: index of the head; None for the mean over heads.
        row: number of the sequence in its recording, also where that is a part of another one.
        layers: the layers that a mean is over; empty where they are not known.
        heads: the heads that a mean is over, where they are not all of the model's; empty for all.
    """

    received: Received
    layer: int | None
    head: int | None
    row: int
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    @property
    def level(self) -> Level:
        """The level of the pattern: head, layer or model."""
        return self.received.level

    @property
    def scores(self) -> Float[Tensor, "step key"]:
        """The scores, in float32 at least; NaN where undefined."""
        return self.received.read("received")[0][:, 0, 0, 0]

    @property
    def masked(self) -> Bool[Tensor, "step key"] | None:
        """Which keys are masked at each step; None if unknown."""
        return None if self.received.masked is None else self.received.masked[:, 0]

    @property
    def content(self) -> Int[Tensor, "position"]:
        """Canvas positions that are not padding."""
        keys = self.received.values.new_ones(self.received.values.shape[-1])
        return (keys if self.received.valid is None else self.received.valid[0]).nonzero().flatten()

    @property
    def steps(self) -> int:
        """The number of steps that the row ran: up to the last one with a counted query, or all if none has any.

        A step of a cached run may compute too few queries for a score; a row that has ended has no queries.
        """
        ran = (self.received.counted[:, 0] > 0).nonzero()
        return int(ran[-1]) + 1 if len(ran) else len(self.scores)

    @property
    def final(self) -> list[int] | None:
        """Token ids after the last step, or if those are unknown of the last step's canvas; None if unknown."""
        if self.received.final_tokens is not None:
            return [int(i) for i in self.received.final_tokens[0]]
        return None if self.received.tokens is None else [int(i) for i in self.received.tokens[-1, 0]]


def choose(received: Any, layer: int | None, head: int | None, row: int, queries: QueryClass = "all") -> Selection:
    """Select a head of a layer, the head mean of a layer (head None), or the model mean (both None).

    Raises:
        TypeError: neither a `Received` nor a `Recording`.
        ValueError: a head without its layer, an unknown layer, head or row, or what `as_received` refuses.
    """
    number, received = row_number(received, row), as_received(received, queries)
    level, given = level_of(layer, head), received
    received = received.at_level(level)
    layers = slice(0, 1) if layer is None else _slice("layer", layer, received.layers)
    heads = slice(0, 1) if head is None else _slice("head", head, received.head_numbers)
    rows = _slice("row", row, range(received.values.shape[1]))
    part = received.part(rows, layers, heads)
    return Selection(part, layer, head, number, given.layers, given.heads)


def row_number(given: Any, row: int) -> int:
    """The number that a row has in the whole recording or run, of which `given` may be a part; else its place."""
    given = meant(given)
    given = given.run if isinstance(given, Recording) else given
    numbers = given.row_numbers if isinstance(given, DenoisingRun | KeyAxes) else ()
    return int(numbers[row]) if is_whole(row) and 0 <= row < len(numbers) else row


def over_before(row: int) -> str:
    """The sentence for a row that had ended before the first step of a part of a run."""
    return f"row {row} was over before the first of these steps; give another row, or earlier steps"


def as_received(given: Any, queries: QueryClass = "all", follow: Follow = "position") -> Received:
    """A `Received` as it is, or the received attention of these queries of a `Recording`, by position or token.

    Raises:
        TypeError: neither of them, or tokens of something else than a `Recording`.
        ValueError: a recording without received attention of these queries, a `Received` of other queries, or no
            steps, rows, layers, heads or keys.
    """
    given = meant(given)
    if follow == "token":
        given = received_by_token(given, queries)
    elif isinstance(given, Recording):
        given = received_of(given, queries)
    check_queries(given, queries)
    if not isinstance(given, Received):
        raise TypeError(
            f"the first argument is a {type(given).__name__}; give a Received (received_over_steps) or a Recording"
        )
    if missing := [axis for axis, size in zip(AXES, given.values.shape, strict=True) if not size]:
        raise ValueError(f"{given!r} has no {missing[0]} to draw; select at least one")
    return given


def check_queries(given: Any, queries: QueryClass) -> None:
    """Raise where a class of queries is given with scores or sinks of another class; "all" leaves them their own.

    Raises:
        ValueError: it is.
    """
    own = getattr(given, "queries", None)
    if queries != "all" and isinstance(own, str) and own != stored_name(queries):
        raise ValueError(
            f"queries is {shown(queries)}, and the {type(given).__name__} has queries {own!r}; queries= goes with "
            "a Recording"
        )


def level_of(layer: int | None, head: int | None) -> Level:
    """The level of a layer and a head, of which None is a mean.

    Raises:
        ValueError: a head without its layer.
    """
    if layer is None and head is not None:
        raise ValueError(f"head {shown(head)} has no layer; give layer= too, or no head")
    return "model" if layer is None else "layer" if head is None else "head"


def index_of(name: str, index: int, indices: Sequence[int]) -> int:
    """The place of a layer, head or row on its axis.

    Raises:
        ValueError: it is no whole number, or not among the indices of the axis.
    """
    index = plain_number(index)
    if not is_whole(index):
        raise ValueError(f"{name} is {shown(index)}; it must be a whole number")
    if index not in indices:
        raise ValueError(f"{name} {index} is not among the {name}s {', '.join(map(str, indices)) or '(none)'}")
    return list(indices).index(index)


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Which numbers an axis has, for errors: "go from 0 to 5", or of a part "are 1, 4, 5"."""
    whole = list(numbers) == list(range(len(numbers)))
    return f"go from 0 to {len(numbers) - 1}" if whole else f"are {', '.join(map(str, numbers))}"


def listed_steps(steps: Any) -> list[int]:
    """Steps that a picture is of, as a list.

    Raises:
        ValueError: a single number, or what is no whole number.
    """
    several = isinstance(steps, Iterable) and not isinstance(steps, str)
    listed = (steps.tolist() if is_array(steps) else list(steps)) if several else steps
    INDICES.check("steps", listed)
    return [int(step) for step in listed]


def step_places(steps: Iterable[int], numbers: Sequence[int]) -> list[int]:
    """The places of steps of a run on the axis of its steps.

    Args:
        steps: their numbers in the run.
        numbers: the number of each step on the axis: 0, 1, ..., or others in a part of a run.

    Raises:
        ValueError: no steps, one that is not on the axis, or a number in the place of a list.
    """
    steps, known = listed_steps(steps), {number: place for place, number in enumerate(numbers)}
    if missing := [step for step in steps if step not in known]:
        raise ValueError(f"step {missing[0]} does not exist; steps {numbers_in_words(numbers)}")
    if not steps:
        raise ValueError("steps is empty; give at least one, or None for those that the picture chooses")
    return [known[step] for step in steps]


def _slice(name: str, index: int, indices: Sequence[int]) -> slice:
    place = index_of(name, index, indices)
    return slice(place, place + 1)


def strongest(received: Received, row: int | None = None) -> tuple[int, int]:
    """Layer and head with the highest mean (over steps and sequences) of the largest score.

    Args:
        received: at the level of heads.
        row: index of the sequence whose steps count; None for all.

    Raises:
        ValueError: an unknown row.
    """
    if row is not None:
        place = index_of("row", row, range(received.values.shape[1]))
        received = received.part(rows=slice(place, place + 1))
    peak = received.values.nan_to_num(nan=-torch.inf).amax(-1)
    mean = torch.where(peak.isfinite(), peak, torch.nan).nanmean((0, 1)).nan_to_num(nan=-torch.inf)
    layer, head = divmod(int(mean.argmax()), mean.shape[1])
    return received.layers[layer], received.head_numbers[head]


def most_moving(paths: Trajectories, row: int | None = None) -> tuple[int | None, int | None]:
    """Layer and head whose sinks move most often; of equals, the one with sinks at the most steps.

    Args:
        paths: from `trajectories`.
        row: index of the sequence in which moves count; None for all.

    Returns:
        Layer and head; None where the level of the paths is a mean.

    Raises:
        ValueError: an unknown row, or no head with a sink in it.
    """
    table = paths.summary(by="head" if row is None else "pattern")
    if row is not None:
        index_of("row", row, range(paths.main.shape[1]))
        size = table.shape[0] // paths.main.shape[1]  # patterns are in the order of rows
        table = table[row * size : (row + 1) * size]
    table = table[table["with_sink"] > 0].sort_values(["moves", "with_sink"], ascending=False, kind="stable")
    if table.empty:
        where = "" if row is None else f" in row {row}"
        raise ValueError(
            f"no head has a sink{where} by {paths.rule}; lower the threshold, or give a layer and a head"
        )
    best = table.iloc[0]
    return tuple(int(best[name]) if name in table else None for name in ("layer", "head"))  # type: ignore[return-value]
