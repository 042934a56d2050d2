"""`at_steps`, `at_layers`, `at_heads`, `at_progress`, `at_encoder`: a hook limited in where it acts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import check_index, listed_indices, plain_number
from dlm_lens.attention import (
    ColumnHook,
    ColumnHookWrapper,
    ColumnMask,
    ColumnStats,
    Hook,
    HookLike,
    HookWrapper,
    PointContext,
    RunStep,
    as_hook,
    attending_layers,
    run_of,
)
from dlm_lens.hooks.base import HEAD_AXIS
from dlm_lens.hooks.schedules import shown_schedule
from dlm_lens.printable import shown

Active = bool | Bool[Tensor, "row"]
"""Whether the hook acts: at all, or in which rows."""


class Limit:
    """A condition on where a hook acts; a subclass replaces a default by a class attribute, a field or a property.

    Attributes:
        layers: the only layers in which the hook need be called; None, the default, for all.
        heads: the only heads in which it acts; None, the default, for all.
        padding_safe: whether the condition is decided for every row on its own. True by default.
        stateless: whether the condition depends on neither step nor progress. False by default.
        stack: the part of the model in which the hook acts; None, the default, for the hook's own.
    """

    if TYPE_CHECKING:

        @property
        def layers(self) -> tuple[int, ...] | None: ...  # noqa: D102
        @property
        def heads(self) -> tuple[int, ...] | None: ...  # noqa: D102
        @property
        def padding_safe(self) -> bool: ...  # noqa: D102
        @property
        def stateless(self) -> bool: ...  # noqa: D102
        @property
        def stack(self) -> str | None: ...  # noqa: D102
    else:
        layers = heads = stack = None
        padding_safe, stateless = True, False

    def active(self, hook: PointContext, who: Hook) -> Active:
        """Whether the hook `who` acts in this context."""
        raise NotImplementedError

    def check(self, run: RunStep, who: Hook) -> None:
        """Raise a ValueError if the run or its model lack a step, a layer or a head; by default do nothing."""

    def first_step(self, total: int) -> int | None:
        """The first of its steps in a run of so many, if it names steps that exist."""
        return None

    def call(self, hook: str) -> str:
        """The limited hook as the call that makes it, from the repr of the hook inside."""
        raise NotImplementedError


@dataclass(frozen=True)
class StepLimit(Limit):
    """Some steps of the run: `steps`, or `bounds` of a slice, which may exceed the run."""

    steps: range | tuple[int, ...] = ()
    bounds: tuple[int | None, int | None, int | None] | None = None

    def active(self, hook: PointContext, who: Hook) -> Active:
        """Whether the run is at one of the steps."""
        run = run_of(hook, who)
        self.check(run, who)
        return run.step in self.within(run.total)

    def within(self, total: int) -> set[int]:
        """The steps, in a run of so many."""
        named = self.steps if self.bounds is None else range(total)[slice(*self.bounds)]
        return {step % total for step in named}

    def check(self, run: RunStep, who: Hook) -> None:
        """Raise a ValueError for steps that the run does not have."""
        if self.bounds is None and self.steps:
            for step in (min(self.steps), max(self.steps)):
                if not -run.total <= step < run.total:
                    raise ValueError(
                        f"{who}: step {step} is not there; the run has steps 0 to {run.total - 1} (or -{run.total} "
                        "to -1; a slice may reach beyond)"
                    )

    def first_step(self, total: int) -> int | None:
        """The first of the steps; `total` for a slice that holds none of the run's."""
        return min(self.within(total), default=total)

    def call(self, hook: str) -> str:
        """The call of the limit around `hook`."""
        if self.bounds is not None:
            given = self.bounds if self.bounds[2] is not None else self.bounds[:2]
            return f"at_steps({hook}, slice({', '.join(map(str, given))}))"
        return f"at_steps({hook}, {self.steps if isinstance(self.steps, range) else list(self.steps)})"


@dataclass(frozen=True)
class LayerLimit(Limit):
    """Some layers of the model."""

    indices: tuple[int, ...]

    stateless = True

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices."""
        return self.indices

    def active(self, hook: PointContext, who: Hook) -> Active:
        """Whether the hook point is in one of the layers."""
        return _in_layers(self.indices, hook, who)

    def check(self, run: RunStep, who: Hook) -> None:
        """Raise a ValueError for layers that the model does not have."""
        _check_indices(self.indices, _layers_of(run), "layer", who)

    def call(self, hook: str) -> str:
        """The call of the limit around `hook`."""
        return f"at_layers({hook}, {list(self.indices)})"


@dataclass(frozen=True)
class HeadLimit(Limit):
    """Some heads of every layer."""

    indices: tuple[int, ...]

    stateless = True

    @property
    def heads(self) -> tuple[int, ...]:
        """The indices."""
        return self.indices

    def active(self, hook: PointContext, who: Hook) -> Active:
        """True: the limit is applied to the hook's output (`Limited.edit`, `LimitedColumns.hidden`)."""
        return True

    def check(self, run: RunStep, who: Hook) -> None:
        """Raise a ValueError for heads that the model does not have."""
        grouped = who.site in ("k", "v", "rot_k")
        name = "num_key_value_heads" if grouped else "num_attention_heads"
        # Layers of Gemma 4 differ in the heads of their keys.
        several = grouped and getattr(run.config, "is_heterogeneous", False)
        _check_indices(self.indices, None if several else getattr(run.config, name, None), "head", who)

    def call(self, hook: str) -> str:
        """The call of the limit around `hook`."""
        return f"at_heads({hook}, {list(self.indices)})"


@dataclass(frozen=True)
class ProgressLimit(Limit):
    """Rows whose progress is in [low, high), or in [low, 1] if `high` is 1; or rows that a function chooses."""

    low: float = 0.0
    high: float = 1.0
    chosen: Callable[[Float[Tensor, "row"]], Any] | None = None

    @property
    def padding_safe(self) -> bool:
        """Whether no function chooses the rows: it gets the progress of all rows at once."""
        return self.chosen is None

    def active(self, hook: PointContext, who: Hook) -> Active:
        """The rows whose progress is in the interval, or that the function chooses."""
        progress = run_of(hook, who).progress
        if self.chosen is None:
            return (progress >= self.low) & ((progress < self.high) | (self.high >= 1))
        found = torch.as_tensor(self.chosen(progress), device=progress.device)
        if found.dtype != torch.bool:
            raise ValueError(
                f"{who}: the function returned numbers of {found.dtype} for the progress of the rows; return truth "
                "values, such as progress < 0.5"
            )
        if found.ndim and found.shape != progress.shape:
            raise ValueError(
                f"{who}: the function returned shape {list(found.shape)} for the progress of {len(progress)} rows; "
                "return one truth value, or one per row"
            )
        return found.expand(progress.shape)

    def call(self, hook: str) -> str:
        """The call of the limit around `hook`."""
        chosen = (self.low, self.high) if self.chosen is None else shown_schedule(self.chosen)
        return f"at_progress({hook}, {chosen})"


@dataclass(frozen=True)
class EncoderLimit(Limit):
    """The encoder's layers, in a model that has an encoder beside its decoder."""

    stateless, stack = True, "encoder"

    def active(self, hook: PointContext, who: Hook) -> Active:
        """True: the hook is in the encoder's layers alone."""
        return True

    def call(self, hook: str) -> str:
        """The call of the limit around `hook`."""
        return f"at_encoder({hook})"


def _in_layers(indices: tuple[int, ...], hook: PointContext, who: Hook) -> bool:
    if hook.index is None:
        raise ValueError(f"{who} needs to know the layer: put it at a hook point by name, or use attach_hooks")
    count = hook.depth if hook.depth is not None else None if hook.run is None else _layers_of(hook.run)
    if count is None and min(indices, default=0) < 0:
        raise ValueError(f"{who}: without a run the number of layers is unknown; count them from 0")
    return hook.index in _from_zero(indices, count)


def _from_zero(indices: tuple[int, ...], count: int | None) -> set[int]:
    """Layers counted from 0, where the number of layers is known."""
    return {index % count if count and index < 0 else index for index in indices}


def _layers_of(run: RunStep) -> int | None:
    return None if run.config is None else attending_layers(run.config)


def _check_indices(indices: tuple[int, ...], count: int | None, what: str, who: Any) -> None:
    for index in indices:
        if count is not None:
            check_index(what, index, count, f"{who}: ")


@dataclass(frozen=True, repr=False)
class Limited(HookWrapper):
    """A hook that acts only where its limit allows; `at_steps`, `at_layers`, `at_heads`, `at_progress` make it."""

    hook: Hook
    limit: Limit

    def __repr__(self) -> str:
        return self.limit.call(repr(self.hook))

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers in which it need be called."""
        if self.sees_all_layers:
            return None
        return self.hook.layers if self.limit.layers is None else self.limit.layers

    @property
    def padding_safe(self) -> bool:
        """Whether hook and limit are."""
        return self.hook.padding_safe and self.limit.padding_safe

    @property
    def stateless(self) -> bool:
        """Whether hook and limit are."""
        return self.hook.stateless and self.limit.stateless

    @property
    def remembers(self) -> bool:
        """As the hook; a limit depends on the present step alone."""
        return self.hook.remembers

    @property
    def stack(self) -> str:
        """The part of the model in which it acts."""
        return self.hook.stack if self.limit.stack is None else self.limit.stack

    def first_step(self, total: int) -> int | None:
        """That of the limit or that of the hook, whichever is later."""
        named = [each.first_step(total) for each in (self.limit, self.hook)]
        return max((step for step in named if step is not None), default=None)

    def check_run(self, run: RunStep) -> None:
        """Refuse what the run or its model do not have.

        Raises:
            ValueError: a step, a layer or a head that is not there, or layers of which the hook has none.
        """
        self.limit.check(run, self)
        own, count = self.hook.layers, _layers_of(run)
        # Limits within limits may leave nothing; a hook's own layers are a fact that a user may not know.
        limited = not isinstance(self.hook, Limited) and own is not None and self.limit.layers is not None
        if limited and not _from_zero(own or (), count) & _from_zero(self.limit.layers or (), count):
            raise ValueError(
                f"{self}: the hook inside acts in layers {list(own or ())} alone; give one of them, or leave out "
                "at_layers"
            )
        self.hook.check_run(run)

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """What the hook refuses, at those of the steps at which the limit is sure to let it act."""
        own = self.limit.within(total) if isinstance(self.limit, StepLimit) else steps
        if isinstance(self.limit, StepLimit | LayerLimit | HeadLimit):
            self.hook.check_steps([step for step in steps if step in own], total)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """The edited activation; where the hook does not act, the activation as it was."""
        active = self._active(hook)
        if not self._any(active, hook):
            return tensor
        keeps_parts = isinstance(active, Tensor) or self.limit.heads is not None
        # A hook may edit its tensor in place, which would reach the parts that are kept.
        edited = self.hook(tensor.clone() if keeps_parts else tensor, hook)
        if isinstance(active, Tensor):
            edited = torch.where(_rows(active, tensor), edited, tensor)
        if self.limit.heads is not None:
            edited = torch.where(self._heads(tensor, self.limit.heads), edited, tensor)
        return edited

    def _active(self, hook: PointContext) -> Active:
        """In which rows the limit lets the hook act; in a layer that the hook leaves out, in none."""
        own = self.hook.layers
        if own is not None and self.limit.layers is not None and not _in_layers(own, hook, self):
            return False
        return self.limit.active(hook, self)

    def _any(self, active: Active, hook: PointContext) -> bool:
        """Whether the hook acts in any row; in a run the device is waited for once a step, not in every layer."""
        if isinstance(active, bool):
            return active
        run = hook.run
        return bool(active.any()) if run is None else bool(run.once(("acts", id(self)), lambda: bool(active.any())))

    def _heads(self, tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
        axis = HEAD_AXIS[self.site]
        wanted = torch.zeros(tensor.shape[axis], dtype=torch.bool, device=tensor.device)
        for head in heads:
            if not -len(wanted) <= head < len(wanted):
                raise ValueError(f"{self}: head {head} of {len(wanted)}")
            place = head % len(wanted)
            wanted[place : place + 1] = True
        return wanted.view(-1, *[1] * (tensor.ndim - axis - 1))


@dataclass(frozen=True, repr=False)
class LimitedColumns(Limited, ColumnHookWrapper):
    """A column hook that acts only where its limit allows; it needs no pattern either."""

    hook: ColumnHook

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """The scores or the pattern without the columns that the hook hides where it acts."""
        return ColumnHook.edit(self, tensor, hook)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """What the hook hides, in the heads and rows in which it acts."""
        active = self._active(hook)
        if not self._any(active, hook):
            self.observe(keys, columns, hook)
            return None
        hidden = self.hook.hidden(keys, columns, hook)
        if hidden is None:
            return None
        if isinstance(active, Tensor):
            hidden = hidden.only_rows(active)
        return hidden if self.limit.heads is None else hidden.only_heads(self.limit.heads)


def at_steps(hook: HookLike, steps: int | range | slice | Sequence[int]) -> Limited:
    """Limit a hook to some steps of the run.

    At the other steps the hook does not act but can still keep statistics, which `source="previous"` and
    `freeze_sinks` need.

    Args:
        hook: any hook.
        steps: a step, a range, a list or a slice; negative steps count from the run's end. A step that the run does
            not have is an error when the run starts; a slice may exceed the run, and one without any of its steps
            warns.

    Raises:
        ValueError: no hook, or no steps.
    """
    inner = as_hook(hook)
    if isinstance(steps, slice):
        return _limited(inner, StepLimit(bounds=_bounds(steps)))
    found = steps if isinstance(steps, range) else _indices(steps, "step")
    if not found:
        raise ValueError(f"at_steps(..., {steps!r}): there is no step in it")
    return _limited(inner, StepLimit(found))


def at_layers(hook: HookLike, layers: int | Sequence[int]) -> Limited:
    """Limit a hook to some layers; negative indices count from the last.

    Raises:
        ValueError: no hook, or no layers.
    """
    inner = as_hook(hook)
    return _limited(inner, LayerLimit(_indices(layers, "layer")))


def at_heads(hook: HookLike, heads: int | Sequence[int]) -> Limited:
    """Limit a hook to some heads of every layer; at k, v and rot_k these are key/value heads.

    Raises:
        ValueError: no hook, no heads, or a hook at a site without heads.
    """
    inner = as_hook(hook)
    if inner.site not in HEAD_AXIS:
        raise ValueError(
            f"{inner} belongs at {inner.site!r}, which has no heads; heads are at {', '.join(HEAD_AXIS)}"
        )
    return _limited(inner, HeadLimit(_indices(heads, "head")))


def at_progress(hook: HookLike, progress: tuple[float, float] | Callable[[Float[Tensor, "row"]], Any]) -> Limited:
    """Limit a hook to rows by their progress, the share of the answer that is decided (in an AR run, step / total).

    Args:
        hook: any hook.
        progress: (low, high) for rows with low <= progress < high, or <= 1 if `high` is 1; or a function from the
            progress of all rows, a tensor, to one truth value or one per row.

    Raises:
        ValueError: no hook, or no interval within 0 and 1.
    """
    inner = as_hook(hook)
    if callable(progress):
        return _limited(inner, ProgressLimit(chosen=progress))
    pair = tuple(map(plain_number, progress)) if isinstance(progress, tuple | list) else ()
    plain = all(isinstance(end, int | float) and not isinstance(end, bool) for end in pair)
    if len(pair) != 2 or not plain or not 0 <= pair[0] < pair[1] <= 1:
        raise ValueError(f"progress is {progress!r}; it must be an interval (low, high) within 0 and 1")
    low, high = pair
    return _limited(inner, ProgressLimit(low, high))


def at_encoder(hook: HookLike) -> Limited:
    """Put a hook into the encoder's layers, in a model with an encoder beside its decoder (DiffusionGemma).

    The encoder runs at the first step of every canvas: it reads the prompt, then each finished canvas, and later
    steps see the keys and values that it left. Positions are those of the whole canvas; negative ones count from
    the last that the encoder has read. All of them are decided. There is no step before of the encoder:
    `source="previous"` reads the pass itself.

    Raises:
        ValueError: no hook, or one that needs a pass without hooks or the mean over all layers.
    """
    inner = as_hook(hook)
    if inner.needs_clean_pass or inner.sees_all_layers:
        raise ValueError(
            f"at_encoder: {inner} reads sinks of the decoder's layers; at the encoder take source='current' and "
            "per='head' or 'layer', or the positions"
        )
    return _limited(inner, EncoderLimit())


def _limited(hook: Hook, limit: Limit) -> Limited:
    return LimitedColumns(hook, limit) if isinstance(hook, ColumnHook) else Limited(hook, limit)


def _bounds(steps: slice) -> tuple[int | None, int | None, int | None]:
    """The ends and the step of a slice, as Python's ints.

    Raises:
        ValueError: an end that is no whole number, or a slice that holds no step of any run.
    """
    given = (steps.start, steps.stop, steps.step)
    start, stop, step = (None if end is None else _indices([end], "step")[0] for end in given)
    ends = [abs(end or 0) for end in (start, stop)]
    # A slice that holds a step of some run holds one of a run of one of these lengths.
    lengths = (1, *ends, *(end + 1 for end in ends), sum(ends) + 1, sum(ends) + 2)
    if step == 0 or not any(range(length)[start:stop:step] for length in lengths):
        raise ValueError(f"at_steps(..., {steps!r}): there is no step in it")
    return start, stop, step


def _indices(given: int | Sequence[int], what: str) -> tuple[int, ...]:
    found = listed_indices(what, given, f"at_{what}s: ")
    if not found:
        raise ValueError(f"at_{what}s: {shown(given)}; give at least one {what} as a whole number")
    return found


def _rows(active: Tensor, tensor: Tensor) -> Tensor:
    repeats, rest = divmod(len(tensor), len(active))
    if rest:
        raise ValueError(f"{len(tensor)} rows of activations do not fit a run of {len(active)} rows")
    return active.repeat(repeats).view(-1, *[1] * (tensor.ndim - 1)).to(tensor.device)
