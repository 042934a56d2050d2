"""`mask_sinks` and `mask_top_sinks`: hide the columns that a detector finds during the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.attention import (
    ColumnHook,
    ColumnMask,
    ColumnStats,
    PointContext,
    RunStep,
    Stage,
    run_of,
    top_columns,
)
from dlm_lens.hooks.base import call_of, check_stage, makes_hook
from dlm_lens.hooks.positions import Classes, checked_classes, columns_of_classes
from dlm_lens.hooks.sink_sources import (
    MeasuredSinks,
    columns_of_pass,
    grown,
    measured_columns,
    received_by,
    scores_of,
    step_place,
    warn_of_model,
)
from dlm_lens.recording import Recording
from dlm_lens.sinks import Detector, Level, Received, Sinks, TopK, received_of
from dlm_lens.sinks.detectors.base import as_detector, of_every_key
from dlm_lens.sinks.received import MERGED

When = Literal["current", "previous", "clean"]
"""The pass of the statistics: this one, that of the previous step, or one over the same canvas without hooks."""


@dataclass(frozen=True, repr=False)
class MaskSinks(ColumnHook):
    """Hide sinks from all queries; build it with `mask_sinks` or `mask_top_sinks`.

    Raises:
        ValueError: settings that contradict each other.
    """

    detector: Detector | None = None
    top: int | None = None
    per: Level = "head"
    source: When | MeasuredSinks = "current"
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False
    relative: bool = True
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_stage(self.stage, self.renormalise)
        object.__setattr__(self, "classes", checked_classes(self.classes))
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
        """Whether the statistics are those of a pass without hooks."""
        return self.source == "clean"

    @property
    def sees_all_layers(self) -> bool:
        """Whether the statistics are the mean over all layers."""
        return self.per == "model" and self.source == "previous"

    @property
    def padding_safe(self) -> bool:
        """True, unless the sinks were measured before: these belong to a canvas."""
        return isinstance(self.source, str)

    @property
    def stateless(self) -> bool:
        """Whether the sinks are those of this pass, or of one without hooks."""
        return self.source in ("current", "clean")

    @property
    def remembers(self) -> bool:
        """Whether the sinks are those of the previous step."""
        return isinstance(self.source, str) and self.source == "previous"

    def check_run(self, run: RunStep) -> None:
        """Warn of sinks that were measured in another model."""
        super().check_run(run)
        if isinstance(self.source, Received | Sinks):
            warn_of_model(self.source, run, self)

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """Refuse a step that sinks which were measured before lack.

        Raises:
            ValueError: naming it.
        """
        if isinstance(source := self.source, Received | Sinks):
            for step in steps:
                step_place(source, step, self)

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
        """Bounds of the number of hidden columns that need no statistics: `ColumnMask.most` and `leaves_one`."""
        most = None if self.detector is None else self.detector.max_sinks
        if self.top is not None:
            most = self.top if most is None else min(self.top, most)
        current = self.source == "current" and self.per == "head"
        leaves_one = self.detector is not None and self.detector.leaves_one and current
        return {"most": most, "leaves_one": leaves_one}

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """Keep the statistics of a step at which a wrapper keeps the hook from acting, for the next step."""
        if self.source == "previous":
            self._remember(columns(), hook)

    def found(
        self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext
    ) -> Bool[Tensor, "batch #head key"] | None:
        """The sinks, of the classes only; None if their statistics do not exist yet."""
        found = self._of_all_classes(keys, columns, hook)
        if found is None or self.classes is None:
            return found
        return found & columns_of_classes(self.classes, keys, hook, self).to(found.device)

    def _of_all_classes(
        self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext
    ) -> Bool[Tensor, "batch #head key"] | None:
        if isinstance(self.source, Received | Sinks):
            settings = (self.source, self.detector, self.top, self.per, self.relative)
            return measured_columns(*settings, keys, hook, self)
        given = self._statistics(columns, hook)
        if given is None:
            return None
        assert self.detector is not None
        scores = scores_of(given, self.per, self.detector.quantity, self.relative)
        found = of_every_key(self.detector, "detect", self.detector.detect(scores), scores)
        if self.top is not None:
            found = top_columns(scores.masked_fill(~found, torch.nan), self.top)
        return grown(found, keys)

    def received(
        self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext
    ) -> Float[Tensor, "batch #head key"]:
        """R_j in the statistics that the detector reads; of this pass, for sinks measured before."""
        given = None if isinstance(self.source, Received | Sinks) else self._statistics(columns, hook)
        given = [columns_of_pass(columns, hook, self)] if given is None else given
        return received_by(given, self.per, keys)

    def _statistics(self, columns: Callable[[], ColumnStats], hook: PointContext) -> Sequence[ColumnStats] | None:
        if self.source == "current":
            return [columns_of_pass(columns, hook, self)]
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
        """Keep this step's statistics of the layer; returns those of the previous step, by layer."""
        run = run_of(hook, self)
        # Equal hooks of a run have different statistics: each acts on what the hooks before it left visible.
        held: dict[int, dict[int, ColumnStats]] = run.memory.setdefault(("received", hook.place, self), {})
        for step in [step for step in held if step not in (run.step - 1, run.step)]:
            del held[step]
        held.setdefault(run.step, {})[hook.layer()] = columns
        return held.get(run.step - 1, {})


def _check_source(hook: MaskSinks) -> None:
    source = hook.source
    if not isinstance(source, Received | Sinks) and source not in get_args(When):
        passes = ", ".join(map(repr, get_args(When)))
        raise ValueError(f"source is {source!r}; it must be {passes}, or a Recording, Received or Sinks")
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


@makes_hook
def mask_sinks(
    detector: Detector | str | None = None,
    *,
    top: int | None = None,
    per: Level = "head",
    source: When | MeasuredSinks | Recording = "current",
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
    relative: bool = True,
    classes: Classes = None,
) -> MaskSinks:
    """Hide the columns of attention sinks from every query (2510.15731, section 4.3).

    The detector reads score_j = r_j / e_j, where r_j = sum_i A_ij over the counted queries and e_j is its value
    under uniform attention, as in `find_sinks`. Keys seen by fewer than 8 counted queries are never sinks. Learned
    sink tokens are keys like any other. A row that would lose every key keeps its own position.

    Args:
        detector: the rule, such as `AboveMean(eps=3.0)` (Eq. 3) or "above-mean:3"; leave it out with `Sinks` as
            source.
        top: hide at most so many columns per map, those that receive most.
        per: detect sinks in every "head"; in the mean over heads of each "layer", for all its heads; or in the mean
            over all layers and heads of the "model", for all of them.
        source: the pass in which sinks are detected. "current": this pass, before this mask acts. "previous": the
            previous step of the run, before this mask acts; at the first step this pass, or with per="model" no
            sink is hidden. "clean": a pass over the same canvas without hooks, which costs one more pass a step. Or
            `Sinks`, a `Received` or a `Recording` of the same prompts: the sinks at the same step, layer and head.
        stage: "before_softmax", the other keys take over the attention; "after", the rows lose it.
        renormalise: with "after", rows sum to 1 again.
        keep_self: no query loses its own position.
        relative: False for the paper's raw column sums r_j.
        classes: of the sinks found by the rule (and by `top`), hide only those whose token at this step belongs to
            one of these classes, such as ("punctuation", "mask"): `dlm_lens.sinks.token_classes.TOKEN_CLASSES`.
            Where the strongest sink belongs to another class, nothing is hidden in its place. None for all.

    Raises:
        ValueError: settings that contradict each other, such as per="model" with source="current", or an unknown
            class.
    """
    if isinstance(source, Recording):
        source = received_of(source)
    if isinstance(detector, str):
        detector = as_detector(detector)
    return MaskSinks(detector, top, per, source, stage, renormalise, keep_self, relative, checked_classes(classes))


@makes_hook
def mask_top_sinks(k: int, **settings: Any) -> MaskSinks:
    """Hide the k columns that receive most attention, without a threshold: `mask_sinks(TopK(k), ...)`.

    2510.15731, Table 1, masks the "top 1, 5 and 10 sinks". With a threshold as well: `mask_sinks(AboveMean(3.0),
    top=5)`.

    Args:
        k: number of columns per map.
        **settings: of `mask_sinks`: per, source, stage, renormalise, keep_self, relative, classes.

    Raises:
        ValueError: settings that contradict each other.
    """
    return mask_sinks(TopK(k), **settings)
