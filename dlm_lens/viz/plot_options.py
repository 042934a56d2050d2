"""What a user asks of a picture on the command line, with the defaults that depend on the recording."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlm_lens.recording import Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import AboveMean, Received, trajectories
from dlm_lens.viz.selection import as_received, index_of, most_moving, strongest

PICKS = ("strongest", "moving")


@dataclass(frozen=True)
class PlotOptions:
    """What a user options of a picture.

    Args:
        recordings: by name, which is what stands in front of the caption.
        layer: index of the layer; None if not given, "mean" for the mean over all.
        head: index of the head; None if not given, "mean" for the mean over heads.
        row: which sequence.
        steps: the steps that were named.
        position: the position that was named, from the prompt's first token.
        pick: which head where none was given: the "strongest", or the one that is "moving" most.
        eps: of the rule, Eq. 3.
        model: name of the model for pictures that need it; None for the recording's.
        title: instead of the recording's name.
    """

    recordings: Mapping[str, Recording]
    layer: int | str | None = None
    head: int | str | None = None
    row: int = 0
    steps: tuple[int, ...] = ()
    position: int | None = None
    pick: str = "strongest"
    eps: float = 3.0
    model: str | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        if self.pick not in PICKS:
            raise ValueError(f"pick is {self.pick!r}; it is {' or '.join(PICKS)}")

    @property
    def recording(self) -> Recording:
        """The first."""
        return next(iter(self.recordings.values()))

    @property
    def name(self) -> str:
        """What stands in front of the caption: how the head was chosen is no secret."""
        if self.title is not None:
            return self.title
        return ", ".join([next(iter(self.recordings)), *self.chosen])

    @property
    def chosen(self) -> list[str]:
        """How the head was chosen where a user left it to us and it is not the strongest."""
        picked = self.layer is None and self.head is None and self.pick == "moving"
        return ["the head whose sinks move most"] if picked else []

    @property
    def rule(self) -> AboveMean:
        """Eq. 3."""
        return AboveMean(self.eps)

    @cached_property
    def received(self) -> Received:
        """Received attention of all queries."""
        return as_received(self.recording)

    @cached_property
    def run(self) -> DenoisingRun:
        """The run."""
        return self.recording.run

    @cached_property
    def network(self) -> Any:
        """The model, loaded by its name; pictures of patterns run it again."""
        from transformers.utils import logging

        from dlm_lens.adapters import load

        logging.disable_progress_bar()
        if not (name := self.model or self.recording.model):
            raise ValueError("the recording does not say which model it is of; give --model")
        return load(name)

    @property
    def wide(self) -> tuple[int | None, int | None]:
        """Layer and head, with None for all or the mean where none was given."""
        layer, head = (None if given == "mean" else given for given in (self.layer, self.head))
        return layer, head  # type: ignore[return-value]

    def place(self, received: Received | None = None) -> tuple[int | None, int | None]:
        """Layer and head; where neither was given, those of the strongest or most moving sink."""
        if self.layer is not None or self.head is not None:
            return self.wide
        received = self.received if received is None else received
        if self.pick == "strongest":
            return strongest(received)
        return most_moving(trajectories(received, self.rule), self.row)

    def one_head(self) -> dict[str, int]:
        """Layer and head, neither a mean."""
        layer, head = self.place()
        if layer is None or head is None:
            raise ValueError("this picture is of one head; give --layer and --head, or neither for the strongest")
        return {"layer": layer, "head": head}

    def step(self) -> int:
        """The one step that was named; the middle of the row's steps by default."""
        if len(self.steps) > 1:
            raise ValueError(f"this picture is of one step, not of {', '.join(map(str, self.steps))}")
        return self.steps[0] if self.steps else self.row_steps // 2

    @property
    def row_steps(self) -> int:
        """How many steps the row ran.

        Raises:
            ValueError: there is no such row.
        """
        index_of("row", self.row, range(len(self.run.tokens)))
        return int(self.run.row_steps[self.row])

    def canvas_position(self) -> int | None:
        """The position that was named, which counts from the prompt's first token, on the canvas.

        Raises:
            ValueError: there is no such row or position.
        """
        if self.position is None:
            return None
        index_of("row", self.row, range(len(self.run.tokens)))
        padding, canvas = int(self.run.padding[self.row]), self.run.tokens.shape[1]
        if not -(canvas - padding) <= self.position < canvas - padding + self.recording.sinks:
            raise ValueError(
                f"position {self.position}: positions of row {self.row} go from 0 to {canvas - padding - 1}"
            )
        return self.position + (padding if self.position >= 0 else canvas)
