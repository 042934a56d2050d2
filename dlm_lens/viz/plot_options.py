"""The options of `dlm-lens plot`, each declared once, with the defaults that depend on the recording.

A new option is a new field of `PlotOptions`. Nothing is imported here before a recording is loaded, so that wrong
options are reported at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dlm_lens.option_values import index_or_mean, one_of, whole_number, whole_numbers
from dlm_lens.recording.query_classes import OTHER_NAMES, QUERY_CLASSES, received_name

if TYPE_CHECKING:
    from dlm_lens.recording import QueryClass, Recording
    from dlm_lens.sampling import DenoisingRun
    from dlm_lens.sinks import Detector, Level, Received, Sinks
    from dlm_lens.sinks.detector_registry import DetectorText
    from dlm_lens.sinks.key_axes import Follow

LEVELS = ("head", "layer", "model")

PICKS = ("strongest", "moving")

FOLLOWS = ("position", "token")


def _option(read: Callable[[str, str], Any], text: str) -> dict[str, Any]:
    """The metadata of a field of `PlotOptions` that is an option of the command line.

    Args:
        read: makes the value from the option's name, such as "--layer", and its text; raises ValueError.
        text: help text.
    """
    return {"read": read, "help": text}


def _read_row(option: str, text: str) -> int:
    if (row := whole_number(option, text)) < 0:
        raise ValueError(f"{option} is {row}; rows go from 0")
    return row


def _read_steps(option: str, text: str) -> tuple[int, ...]:
    return tuple(whole_numbers(option, text))


def _read_rule(option: str, text: str) -> "DetectorText":
    from dlm_lens.sinks.detector_registry import parse_detector

    return parse_detector(text, option=option)


def _read_hooks(option: str, text: str) -> str:
    from dlm_lens.hooks.expressions import check_given

    check_given(text)
    return text


def _read_model(option: str, text: str) -> str:
    from dlm_lens.adapters.model_names import check_model_name

    check_model_name(text)
    return text


@dataclass(frozen=True)
class PlotOptions:
    """What a picture is of, and how it is drawn.

    Each option is a field, which its help text describes; numbers count from 0, and None is an option not given.

    Args:
        recordings: name, with which the caption begins -> recording; most pictures are of the first one.
        title: the beginning of the caption instead of the recording's name.
        loading: further arguments of `dlm_lens.load` for it.

    Raises:
        ValueError: an unknown pick or level.
    """

    recordings: "Mapping[str, Recording]"
    title: str | None = None
    layer: int | str | None = field(
        default=None, metadata=_option(index_or_mean, "Index of the layer, or mean; see also --pick.")
    )
    head: int | str | None = field(
        default=None, metadata=_option(index_or_mean, "Index of the head, or mean; see also --pick.")
    )
    row: int = field(
        default=0, metadata=_option(_read_row, "Index of the sequence in the recording; 0 by default.")
    )
    steps: tuple[int, ...] = field(default=(), metadata=_option(_read_steps, "Steps, such as 4,12."))
    position: int | None = field(
        default=None, metadata=_option(whole_number, "A position, counted from the prompt's first token.")
    )
    pick: str = field(
        default="strongest",
        metadata=_option(
            partial(one_of, allowed=PICKS),
            "The head to draw without --layer and --head: strongest (highest score of its main sink in the row, "
            "mean over steps; the default) or moving (most moves of its sinks there).",
        ),
    )
    detector: "DetectorText | None" = field(
        default=None,
        metadata=_option(
            _read_rule, "The rule that finds sinks, such as above-mean:3 (the default), above-std:3 or top-k:5."
        ),
    )
    queries: "QueryClass" = field(
        default="all",
        metadata=_option(
            partial(one_of, allowed=(*QUERY_CLASSES, *OTHER_NAMES)),
            "Which queries count: all (the default), masked, unmasked, prompt or block, as recorded.",
        ),
    )
    level: "Level" = field(
        default="head",
        metadata=_option(
            partial(one_of, allowed=LEVELS),
            "Which patterns are judged, in pictures of all heads: head (the default), layer (mean over heads) or "
            "model.",
        ),
    )
    follow: "Follow" = field(
        default="position",
        metadata=_option(
            partial(one_of, allowed=FOLLOWS),
            "What is followed: position (the default), or token, where the sampler moves some (DreamOn, LLaDA2.2).",
        ),
    )
    hooks: str | None = field(
        default=None,
        metadata=_option(
            _read_hooks,
            "Interventions for pictures that run the model, or run for those of the recording; none by default.",
        ),
    )
    model: str | None = field(
        default=None,
        metadata=_option(_read_model, "The model, for pictures that run it; the recording's own by default."),
    )
    loading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("pick", self.pick, PICKS)
        one_of("level", self.level, LEVELS)

    @property
    def recording(self) -> "Recording":
        """The first recording."""
        return next(iter(self.recordings.values()))

    @property
    def name(self) -> str:
        """The beginning of the caption: the title or the recording's name, and how the head was chosen."""
        if self.title is not None:
            return self.title
        return ", ".join([next(iter(self.recordings)), *self.chosen])

    @property
    def chosen(self) -> list[str]:
        """How the head was chosen, unless it was given or is the strongest one."""
        picked = self.layer is None and self.head is None and self.pick == "moving"
        return ["the head whose sinks move most"] if picked else []

    @cached_property
    def rule(self) -> "Detector":
        """The detector."""
        from dlm_lens.sinks import AboveMean

        detector: Detector = AboveMean(3.0) if self.detector is None else self.detector.build()
        return detector

    @cached_property
    def received(self) -> "Received":
        """Received attention of the queries that count."""
        from dlm_lens.viz.selection import as_received

        return as_received(self.recording, self.queries, self.follow)

    def sinks(self) -> "Sinks":
        """The sinks of the recording by the rule, at the level and with the queries that are given.

        Raises:
            ValueError: the recording lacks what the rule reads; queries or another level for a rule that reads
                hidden states.
        """
        from dlm_lens.sinks import find_sinks

        return find_sinks(self.recording, self.rule, level=self.level, queries=self.queries)

    @property
    def run(self) -> "DenoisingRun":
        """The recorded run."""
        return self.recording.run

    @property
    def interventions(self) -> tuple[Any, ...]:
        """The hooks for pictures that run the model.

        Raises:
            ValueError: the recording's own, where there are none, or their text does not hold them.
        """
        from dlm_lens.hooks.expressions import given_hooks

        return given_hooks(self.hooks or "", self.run)

    @cached_property
    def network(self) -> Any:
        """The model, loaded by its name, for pictures that run it again.

        Raises:
            ValueError: the recording does not name its model, and none is given; or that had an adapter, which
                `loading` lacks; or what `interventions` refuses.
        """
        from dlm_lens.adapters import load
        from dlm_lens.adapters.model_names import base_of

        _ = self.interventions  # refuses hooks that cannot be before it loads
        if not (recorded := self.model or self.recording.model):
            raise ValueError("the recording does not name its model; give --model")
        return load(self.model or base_of(recorded, self.loading), **self.loading)

    @property
    def layer_and_head(self) -> tuple[int | None, int | None]:
        """Layer and head as given, None for a mean and where none is given."""
        layer, head = (None if given == "mean" else given for given in (self.layer, self.head))
        return layer, head  # type: ignore[return-value]

    def place(self, received: "Received | None" = None) -> tuple[int | None, int | None]:
        """Layer and head; where neither is given, those of the strongest or most moving sink.

        Args:
            received: of another recording than the first.

        Raises:
            ValueError: neither is given, and the recording lacks the received attention that would choose.
        """
        from dlm_lens.sinks import trajectories
        from dlm_lens.viz.selection import most_moving, strongest

        if self.layer is not None or self.head is not None:
            return self.layer_and_head
        if received is None and (name := self.statistic("received")) not in self.recording.specs:
            raise ValueError(
                f"the {self.pick} head is chosen by {name}, which this recording lacks; give --layer, and "
                f"--head in a picture of one head, or record with ReceivedAttention(queries={self.queries!r})"
            )
        received = self.received if received is None else received
        if self.pick == "strongest":
            return strongest(received, self.row)
        return most_moving(trajectories(received, self.rule), self.row)

    def one_layer(self) -> int:
        """The layer of `place`, which must not be a mean.

        Raises:
            ValueError: it is.
        """
        layer, _ = self.place()
        if layer is None:
            raise ValueError("this picture is of one layer; give --layer")
        return layer

    def one_head(self) -> tuple[int, int]:
        """Layer and head of `place`, which must not be means.

        Raises:
            ValueError: one is.
        """
        layer, head = self.place()
        if layer is None or head is None:
            raise ValueError("this picture is of one head; give --layer and --head, or neither for the strongest")
        return layer, head

    def step(self) -> int:
        """The number of the one step that is given; the middle of the row's steps by default.

        Raises:
            ValueError: several are given, or one that the row did not run, or it ran none of this part's.
        """
        from dlm_lens.viz.selection import over_before

        if len(self.steps) > 1:
            raise ValueError(f"this picture is of one step, not of {', '.join(map(str, self.steps))}")
        ran = self.run.step_numbers[: self.row_steps]
        if not ran:
            raise ValueError(over_before(self.row))
        step = self.steps[0] if self.steps else ran[len(ran) // 2]
        if step not in ran:
            raise ValueError(f"step {step}: the steps of row {self.row} go from {ran[0]} to {ran[-1]}")
        return step

    @property
    def row_steps(self) -> int:
        """How many steps the row ran.

        Raises:
            ValueError: the recording has no such row.
        """
        from dlm_lens.viz.selection import index_of

        index_of("row", self.row, range(len(self.run.tokens)))
        return int(self.run.row_steps[self.row])

    def canvas_position(self) -> int | None:
        """The given position, which counts from the prompt's first token, on the canvas.

        Raises:
            ValueError: the recording has no such row or position.
        """
        from dlm_lens.viz.selection import index_of

        if self.position is None:
            return None
        index_of("row", self.row, range(len(self.run.tokens)))
        padding, canvas = int(self.run.padding[self.row]), self.run.tokens.shape[1]
        if not -(canvas - padding) <= self.position < canvas - padding + self.recording.sinks:
            raise ValueError(
                f"position {self.position}: positions of row {self.row} go from 0 to {canvas - padding - 1}"
            )
        return self.position + (padding if self.position >= 0 else canvas)

    def statistic(self, needs: str) -> str:
        """The array of a recording that a picture reads: received attention is that of the queries that count."""
        return received_name(self.queries) if needs == "received" else needs


PLOT_OPTIONS: Mapping[str, str] = {one.name: one.metadata["help"] for one in fields(PlotOptions) if one.metadata}
"""Option -> its help text."""


def read_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of options, read from their texts.

    Args:
        texts: option -> the text that was given.

    Raises:
        ValueError: a text that the option does not take.
    """
    readers = {one.name: one.metadata["read"] for one in fields(PlotOptions) if one.metadata}
    return {name: readers[name](f"--{name}", text) for name, text in texts.items()}
