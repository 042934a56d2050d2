"""`mask_sinks`: hide the columns that a detector calls sinks, found while the run goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.attention import ColumnHook, ColumnMask, ColumnStats, PointContext, Stage, run_of, top_columns
from dlm_lens.hooks.base import call_of, check_stage
from dlm_lens.hooks.sink_sources import MeasuredSinks, grown, measured_columns, received_by, scores_of
from dlm_lens.recording import Recording
from dlm_lens.sinks import Detector, Level, Received, Sinks, TopK, received_of
from dlm_lens.sinks.received import MERGED

When = Literal["current", "previous", "clean"]
"""Which pass the statistics are of: this one, the run's step before, or one over the same canvas without hooks."""


@dataclass(frozen=True, repr=False)
class MaskSinks(ColumnHook):
    """Hide the sinks from all queries; build it with `mask_sinks` or `mask_top_sinks`.

    Raises:
        ValueError: settings that cannot work.
    """

    detector: Detector | None = None
    top: int | None = None
    per: Level = "head"
    source: When | MeasuredSinks = "current"
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False
    relative: bool = True

    def __post_init__(self) -> None:
        check_stage(self.stage, self.renormalise)
        if self.top is not None and (isinstance(self.top, bool) or not isinstance(self.top, int) or self.top < 1):
            raise ValueError(f"top is {self.top!r}; it must be a whole number of at least 1, or None for all sinks")
        if self.per not in get_args(Level):
            raise ValueError(f"per is {self.per!r}; it must be one of {', '.join(get_args(Level))}")
        _check_source(self)
        _check_detector(self)

    def __repr__(self) -> str:
        return call_of(self, "mask_sinks", () if self.detector is None else ("detector",))

    @property
    def needs_clean_pass(self) -> bool:
        """Whether the run takes the statistics of a pass without hooks before each step."""
        return self.source == "clean"

    @property
    def sees_all_layers(self) -> bool:
        """Whether it has to see every layer, also those in which it does not act."""
        return self.per == "model" and self.source == "previous"

    @property
    def padding_safe(self) -> bool:
        """Yes, unless the sinks are known beforehand, which belong to a canvas."""
        return isinstance(self.source, str)

    @property
    def stateless(self) -> bool:
        """Where the sinks are those of this pass, or of one without hooks."""
        return self.source in ("current", "clean")

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """The columns of the sinks."""
        found = self.found(keys, columns, hook)
        return (
            None
            if found is None
            else ColumnMask(found, self.stage, self.keep_self, self.renormalise, **self.bounds)
        )

    @property
    def bounds(self) -> dict[str, Any]:
        """What is known of the number of columns before any is looked for: `ColumnMask.most` and `leaves_one`."""
        most = None if self.detector is None else self.detector.max_sinks
        if self.top is not None:
            most = self.top if most is None else min(self.top, most)
        current = self.source == "current" and self.per == "head"
        leaves_one = self.detector is not None and self.detector.leaves_one and current
        return {"most": most, "leaves_one": leaves_one}

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """See a step at which a wrapper keeps the hook from acting: the next one may ask for its statistics."""
        if self.source == "previous":
            self._remember(columns(), hook)

    def found(
        self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext
    ) -> Bool[Tensor, "batch #head key"] | None:
        """The sinks; None where the statistics that they are judged by are not there yet."""
        if isinstance(self.source, Received | Sinks):
            settings = (self.source, self.detector, self.top, self.per, self.relative)
            return measured_columns(*settings, keys, hook, self)
        given = self._statistics(columns, hook)
        if given is None:
            return None
        assert self.detector is not None
        scores = scores_of(given, self.per, self.detector.quantity, self.relative)
        found = self.detector.detect(scores)
        if self.top is not None:
            found = top_columns(scores.masked_fill(~found, torch.nan), self.top)
        return grown(found, keys)

    def received(
        self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext
    ) -> Float[Tensor, "batch #head key"]:
        """R_j in the statistics that the sinks are judged by; of known sinks (`source=sinks`), in this pass."""
        given = None if isinstance(self.source, Received | Sinks) else self._statistics(columns, hook)
        return received_by([columns()] if given is None else given, self.per, keys)

    def _statistics(self, columns: Callable[[], ColumnStats], hook: PointContext) -> Sequence[ColumnStats] | None:
        if self.source == "current":
            return [columns()]
        run = run_of(hook, self)
        if self.source == "clean":
            if run.clean is None:
                raise ValueError(f"{self} needs a pass without hooks, and this host does not run one")
            clean = run.clean()
            return list(clean.values()) if self.per == "model" else [clean[hook.layer()]]
        now = columns()
        before = self._remember(now, hook)
        if self.per == "model":
            return list(before.values()) or None
        return [before.get(hook.layer(), now)]

    def _remember(self, columns: ColumnStats, hook: PointContext) -> dict[int, ColumnStats]:
        """Keep this step's statistics of the layer; returns those of the step before, by layer."""
        run = run_of(hook, self)
        # Equal hooks of a run see different things: each stands where the ones before it have hidden something.
        place = hook.place
        held: dict[int, dict[int, ColumnStats]] = run.memory.setdefault(("received", place, self), {})
        for step in [step for step in held if step not in (run.step - 1, run.step)]:
            del held[step]
        held.setdefault(run.step, {})[hook.layer()] = columns
        return held.get(run.step - 1, {})


def _check_source(hook: MaskSinks) -> None:
    source = hook.source
    if not isinstance(source, Received | Sinks) and source not in get_args(When):
        known = ", ".join(map(repr, get_args(When)))
        raise ValueError(f"source is {source!r}; it must be {known}, or a Recording, Received or Sinks")
    if hook.per == "model" and source == "current":
        raise ValueError(
            "per='model' needs all layers, and the current pass has not reached the later ones; take "
            "source='previous', 'clean' or a recording"
        )
    if isinstance(source, Sinks) and hook.per not in ("head", source.level):
        raise ValueError(f"per={hook.per!r}, but these Sinks were found at level {source.level!r}")
    if isinstance(source, Received) and len(MERGED[hook.per]) < len(MERGED[source.level]):
        raise ValueError(f"per={hook.per!r}, but this Received has the {source.level} mean only")


def _check_detector(hook: MaskSinks) -> None:
    detector: Any = hook.detector
    if isinstance(hook.source, Sinks):
        if detector not in (None, hook.source.detector):
            raise ValueError(f"these Sinks were found by {hook.source.detector}; leave {detector!r} out")
        return
    if isinstance(detector, type) or not isinstance(detector, Detector):
        raise ValueError(f"{detector!r} is not a detector; give one with its settings, such as AboveMean(eps=3.0)")
    if detector.reads_hidden_states:
        raise ValueError(
            f"{detector} reads {detector.quantity!r}, not attention; give its Sinks as source=, or the positions "
            "to mask_positions"
        )


def mask_sinks(
    detector: Detector | None = None,
    *,
    top: int | None = None,
    per: Level = "head",
    source: When | MeasuredSinks | Recording = "current",
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
    relative: bool = True,
) -> MaskSinks:
    """Hide the columns of attention sinks from every query (2510.15731, section 4.3).

    The detector judges score_j = r_j / e_j, r_j = sum_i A_ij over the counted queries and e_j what even attention
    would give, as `find_sinks` does; keys seen by fewer than 8 counted queries are no sinks. Learned sink tokens
    are keys like any other. A row that would end empty keeps its own position.

    Args:
        detector: the rule, such as `AboveMean(eps=3.0)` (Eq. 3); leave it out with `Sinks` as source.
        top: at most so many per map, those that receive most.
        per: judge every "head" by itself; the head-mean pattern of each "layer", for all its heads; or the mean
            over all layers and heads of the "model", for all of them.
        source: where the sinks are looked for. "current": in this pass, in front of this mask. "previous": in the
            run's step before, in front of this mask; at the first step in this pass, with per="model" nothing is
            hidden then. "clean": in a pass over the same canvas without hooks, one more pass a step. Or `Sinks`, a
            `Received` or a `Recording` of the same prompts: at the same step, layer and head.
        stage: "before_softmax", the other keys take over the attention; "after", the rows lose it.
        renormalise: with "after", rows sum to 1 again.
        keep_self: every query keeps its own position, as if it were no sink.
        relative: False for the paper's raw column sums r_j.

    Raises:
        ValueError: settings that cannot work, such as per="model" of the current pass.
    """
    if isinstance(source, Recording):
        source = received_of(source)
    return MaskSinks(detector, top, per, source, stage, renormalise, keep_self, relative)


def mask_top_sinks(k: int, **settings: Any) -> MaskSinks:
    """Hide the k columns that receive most, however little that is: `mask_sinks(TopK(k), ...)`.

    2510.15731, Table 1, masks the "top 1, 5 and 10 sinks"; with a threshold beside it: `mask_sinks(AboveMean(3.0),
    top=5)`.

    Args:
        k: how many per map.
        **settings: of `mask_sinks`: per, source, stage, renormalise, keep_self, relative.

    Raises:
        ValueError: settings that cannot work.
    """
    return mask_sinks(TopK(k), **settings)
