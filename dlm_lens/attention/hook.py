"""`Hook` and `ColumnHook`, the base classes of interventions; `as_hook` adapts a user's own objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from dlm_lens.attention.column_masking import (
    ColumnMask,
    Stage,
    count_hidden,
    counted_queries,
    own_keys,
    visible_from_pattern,
)
from dlm_lens.attention.column_stats import ColumnStats, DeferredColumnStats, columns_of
from dlm_lens.attention.hook_context import HookContext, PointContext, RunStep
from dlm_lens.attention.sink_layout import SinkLayout, SinkToken
from dlm_lens.attention.softmax_variants import rows_of_one
from dlm_lens.attention.visibility import AttentionPass, visible_in
from dlm_lens.printable import shown
from dlm_lens.shapes import edited_by

Site = Literal["q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "attn_out", "mlp_out", "resid"]
"""Where a hook belongs: a hook point of attention, what attention or MLP add to the residual stream, or the
residual stream after a block."""

SITES: tuple[Site, ...] = get_args(Site)

HOOK_ATTRIBUTES = frozenset({
    "site", "layers", "stack", "stateless", "remembers", "padding_safe", "shifts_with_padding", "row_count",
    "needs_clean_pass", "sees_all_layers",
})  # fmt: skip
"""What the library reads of a hook, as `Hook` documents it. A hook that reads another one has them from it
(`DelegatingHook`), the adapter of a user's own object from the object."""


class HookLike(Protocol):
    """What a user may give as a hook: a `Hook`, or an object or function with a site and a call."""

    @property
    def site(self) -> Any:
        """One of `SITES`."""
        ...

    @property
    def __call__(self) -> Callable[..., Any]:
        """`(tensor, hook=None) -> tensor`."""
        ...


class Hook:
    """An intervention on one activation: a small frozen value, callable with TransformerLens's signature.

    A subclass gives `site` and overrides `edit`. It returns a new tensor and never edits its argument in place.
    Its fields are settings only; what it needs of the run arrives in the context, and what it keeps from one step
    to the next goes into `RunStep.memory`.

    The library reads these attributes. A subclass replaces a default by a class attribute, a field or a property.

    Attributes:
        site: the activation that it edits; no default.
        layers: the only layers in which it acts, negative from the end; None, the default, for all.
        stateless: whether its effect follows from the forward pass alone, not from the step or from earlier steps.
            Evaluation may then cut runs short. False by default.
        remembers: whether it depends on what an earlier step left in `RunStep.memory`. A pass over one step of a
            finished run (`rerun(steps=)`) then comes after passes over all steps before. By default, if it is not
            stateless.
        padding_safe: whether every row of a padded batch gets what it gets alone. Evaluation may then batch prompts
            of unequal length. False by default.
        shifts_with_padding: whether it names canvas positions from the beginning, which are other tokens in a row
            that is padded. `record` then batches prompts of equal length alone, and other runs warn. By default
            whether its field `positions` has a whole number from 0 on.
        row_count: how many rows of a run it has values for; None for any number. Such a hook acts in one batch
            only. By default from the lists of `by_row` in its field `positions`.
        needs_clean_pass: whether `RunStep.clean` is needed, which costs one more forward pass a step. False by
            default.
        sees_all_layers: whether the hook has to be called in every layer, even inside `at_layers`. False by
            default.
        stack: the part of the model (`attention_stacks`) in whose layers it acts; "", the default, for the one that
            predicts, "encoder" for the encoder beside a decoder.
    """

    if TYPE_CHECKING:
        # Read-only to a type checker: a field of a frozen dataclass and a property may then override them.
        @property
        def site(self) -> Site: ...  # noqa: D102
        @property
        def layers(self) -> tuple[int, ...] | None: ...  # noqa: D102
        @property
        def stateless(self) -> bool: ...  # noqa: D102
        @property
        def padding_safe(self) -> bool: ...  # noqa: D102
        @property
        def needs_clean_pass(self) -> bool: ...  # noqa: D102
        @property
        def sees_all_layers(self) -> bool: ...  # noqa: D102
        @property
        def stack(self) -> str: ...  # noqa: D102
    else:
        layers, stack = None, ""
        stateless = padding_safe = needs_clean_pass = sees_all_layers = False

    def __call__(self, tensor: Tensor, hook: HookContext | None = None) -> Tensor:
        """Return the edited activation.

        Args:
            tensor: the activation at `site`.
            hook: the context that the host passes; None in a bare call.

        Raises:
            ValueError: what the hook needs is not in the context, or it returned something else than such a tensor.
        """
        return edited_by(self, tensor, self.edit(tensor, PointContext.of(hook)))

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the edited activation; every subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} is a Hook without an edit(tensor, hook)")

    def check_run(self, run: RunStep) -> None:
        """Refuse a run that lacks a step, a layer, a head or a position that the hook needs.

        Called once, before the first forward pass. By default the positions in its field `positions` are checked.

        Raises:
            ValueError: a position that the run's finished canvas will not have either, or the model's sink tokens.
        """
        positions = getattr(self, "positions", None)
        for position in positions if isinstance(positions, tuple) else ():
            _check_position(position, run, self)

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """Refuse a run of `total` steps, at all of these `steps` of which the hook will act; by default none.

        Called before the first pass, where the run's tokens cannot change how many steps it has, and with the steps
        of a finished run that are passed over again.

        Raises:
            ValueError: a step for which the hook lacks what it needs.
        """

    def check_layer(self, block: nn.Module) -> None:
        """Refuse a decoder layer whose activation at the site is not what the hook edits; by default none.

        Called before the hook is put into the layer.

        Raises:
            ValueError: naming the hook and the layer's class.
        """

    def first_step(self, total: int) -> int | None:
        """The first step at which it acts in a run of `total` steps, if it names steps; None if it names none.

        From `total` on, where none of its steps is in the run.
        """
        return None

    @property
    def remembers(self) -> bool:
        """Whether it may depend on what an earlier step left."""
        return not self.stateless

    @property
    def shifts_with_padding(self) -> bool:
        """Whether its field `positions` names canvas positions from the beginning."""
        positions = getattr(self, "positions", None)
        return isinstance(positions, tuple) and any(isinstance(each, int) and each >= 0 for each in positions)

    @property
    def row_count(self) -> int | None:
        """The number of lists of `by_row` in its field `positions`, if there are several."""
        positions = getattr(self, "positions", None)
        found = [len(getattr(each, "rows", ())) for each in positions] if isinstance(positions, tuple) else []
        return max(found, default=0) if max(found, default=0) > 1 else None

    @property
    def key(self) -> Any:
        """What identifies the hook in a run's memory: itself, or its id where it is not hashable."""
        return _itself_or_id(self)


class ColumnHook(Hook):
    """A hook that hides columns of the attention pattern. A subclass overrides `hidden`.

    Called at its site, it edits scores or the pattern. While nothing else reads these, attention calls `hidden`
    directly, with statistics computed in tiles, and runs the fused kernel on the columns that are left. The results
    are the same.

    Attributes:
        stage: hide scores ("before_softmax", the default) or entries of the pattern ("after").
    """

    if TYPE_CHECKING:

        @property
        def stage(self) -> Stage: ...  # noqa: D102
    else:
        stage = "before_softmax"

    @property
    def site(self) -> Site:
        """`scores` before the softmax, `pattern` after it."""
        return "scores" if self.stage == "before_softmax" else "pattern"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the scores or the pattern `[batch, head, query, key]` without the hidden columns."""
        return hide_columns(self, tensor, hook)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """Which columns to hide in this layer, at this step; None for none.

        Args:
            keys: number of keys, those of learned sink tokens among them.
            columns: computes what each key receives, at the cost of a pass over the scores.
            hook: the context.
        """
        raise NotImplementedError(f"{type(self).__name__} is a ColumnHook without a hidden(keys, columns, hook)")

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """See a step at which a wrapper such as `at_steps` keeps the hook from acting; by default do nothing."""


def _declared(name: str) -> property:
    """The attribute of the user's object, or the default of `Hook`."""

    def found(adapter: "HookAdapter") -> Any:
        default = getattr(super(HookAdapter, adapter), name)
        own = getattr(adapter.wrapped, name, default)
        return own if default is None or own is None else type(default)(own)

    return property(found, doc=f"`{name}` as the object declares it; otherwise the default of `Hook`.")


@dataclass(frozen=True, repr=False)
class HookAdapter(Hook):
    """A user's own object or function with a `site` and a call `(tensor, hook)`, as a `Hook`; `as_hook` makes it.

    Attributes and methods of `Hook` that the object lacks have their defaults. Its call gets the host's context
    unchanged.
    """

    wrapped: Any

    def __repr__(self) -> str:
        return repr(self.wrapped)

    @property
    def site(self) -> Site:
        """Its site."""
        site: Site = self.wrapped.site
        return site

    @property
    def positions(self) -> Any:
        """Its field `positions`, by which `Hook` finds its defaults."""
        return getattr(self.wrapped, "positions", None)

    @property
    def key(self) -> Any:
        """The object's own."""
        return _itself_or_id(self.wrapped)

    def __call__(self, tensor: Tensor, hook: HookContext | None = None) -> Tensor:
        """Call the object."""
        return edited_by(self.wrapped, tensor, self.wrapped(tensor, hook))

    def first_step(self, total: int) -> int | None:
        """What the object returns, if it has a method `first_step`."""
        named = getattr(self.wrapped, "first_step", None)
        step: int | None = named(total) if callable(named) else None
        return step

    def check_run(self, run: RunStep) -> None:
        """What the object refuses; without a `check_run`, what a `Hook` with its field `positions` refuses.

        Raises:
            ValueError: naming it.
        """
        getattr(self.wrapped, "check_run", super().check_run)(run)

    def check_steps(self, steps: Sequence[int], total: int) -> None:
        """What the object refuses, if it has a `check_steps`.

        Raises:
            ValueError: naming it.
        """
        getattr(self.wrapped, "check_steps", super().check_steps)(steps, total)

    def check_layer(self, block: nn.Module) -> None:
        """What the object refuses, if it has a `check_layer`.

        Raises:
            ValueError: naming it.
        """
        getattr(self.wrapped, "check_layer", super().check_layer)(block)


for _name in HOOK_ATTRIBUTES - {"site"}:
    setattr(HookAdapter, _name, _declared(_name))


@dataclass(frozen=True, repr=False)
class ColumnHookAdapter(HookAdapter, ColumnHook):
    """A user's own object that also has `hidden`, as a `ColumnHook`."""

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """What the object hides."""
        found: ColumnMask | None = self.wrapped.hidden(keys, columns, hook)
        return found

    def observe(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> None:
        """Let the object see the step, if it has an `observe`."""
        observe = getattr(self.wrapped, "observe", None)
        if observe is not None:
            observe(keys, columns, hook)


def _check_position(position: Any, run: RunStep, who: Hook) -> None:
    """Raise if a canvas will never have a position, however much of it the first step sees."""
    canvas = run.tokens.shape[-1] if run.whole is None else run.whole
    if isinstance(position, int | SinkToken):
        layout = SinkLayout(getattr(run.config, "num_sinks", 0))
        layout.locate(position, canvas + layout.count)
    elif (check := getattr(position, "check_run", None)) is not None:
        check(run, canvas, who)


def is_hook(value: Any) -> bool:
    """Whether `as_hook` accepts it: a `Hook`, or anything with a `site` and a call."""
    return not isinstance(value, type) and hasattr(value, "site") and callable(value)


def as_hook(value: Any) -> Hook:
    """The `Hook` that a user gave, or the adapter of a user's own object or function.

    Raises:
        ValueError: it has no site or no call, or its site does not exist.
    """
    if not is_hook(value):
        read = "dlm_lens.hooks.parse_hooks reads texts"
        named = "functions for named hook points go to dlm_lens.bridge(model).denoise(fwd_hooks=)"
        aside = f" ({read})" if isinstance(value, str) else f" ({named})" if isinstance(value, tuple) else ""
        raise ValueError(
            f"{shown(value)} is no hook; take one of dlm_lens.hooks{aside}, or an object with a site and a call "
            "(tensor, hook)"
        )
    if not isinstance(value.site, str) or value.site not in SITES:
        raise ValueError(f"{shown(value)} belongs at {shown(value.site)}, which is none of {', '.join(SITES)}")
    if isinstance(value, Hook):
        return value
    return ColumnHookAdapter(value) if callable(getattr(value, "hidden", None)) else HookAdapter(value)


def key_of(hook: Any) -> Any:
    """`Hook.key` of a hook, or of a user's own object or function before it is adapted."""
    return hook.key if isinstance(hook, Hook) else _itself_or_id(hook)


def _itself_or_id(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def hide_columns(hook: Any, tensor: Tensor, context: HookContext | None) -> Tensor:
    """Run a column hook on materialised scores or a pattern `[batch, head, query, key]`; returns the edited one.

    Raises:
        ValueError: the hook hides no columns, a host put it at another hook point, or attention has a cache.
    """
    column, point = as_hook(hook), PointContext.of(context)
    if not isinstance(column, ColumnHook):
        raise ValueError(f"{hook!r} hides no columns: it has no hidden(keys, columns, hook)")
    _check_point(column, point)
    rows, heads, queries, keys = tensor.shape
    known = point.attention_pass
    start = None if known is None else known.query_start
    if start is None and point.run is not None:
        start = point.run.first_of(queries)
    if queries != keys and point.run is not None and start is None:
        raise ValueError(
            f"{hook}: attention has {queries} of {keys} queries, and a column is hidden from "
            "all of them; decode without a cache (use_cache=False)"
        )
    before = column.site == "scores"
    after = partial(visible_from_pattern, tensor, point) if known is None else partial(known.visible, point.rows)
    visible = visible_in(tensor) if before else after()
    seen = visible.any((1, 2)) if known is None else known.seen_by_any(point.rows)
    counted = counted_queries(rows, queries, keys, point, tensor.device, seen, start)

    def statistics() -> ColumnStats:
        pattern = (known or AttentionPass()).softmax(tensor, point.rows) if before else tensor.float()
        return columns_of(pattern, visible, counted)

    columns = DeferredColumnStats(statistics)
    with torch.no_grad():
        hidden = column.hidden(keys, columns, point)
    if hidden is None:
        return tensor
    hidden = hidden.resolved(heads, tensor.device)
    count_hidden(column.key, hidden, rows, heads, point, columns.found)
    entries = hidden.entries(visible, own_keys(queries, keys, tensor.device, start))
    if before:
        return tensor.masked_fill(entries, torch.finfo(tensor.dtype).min)
    if known is not None:
        known.hide(entries, point.rows)
    edited = tensor.masked_fill(entries, 0.0)
    if not hidden.renormalise:
        return edited
    whole = rows_of_one(edited).to(edited.dtype)
    # Rows may sum to less than 1 for another reason, such as a spare entry: those of other heads stay so.
    return torch.where(hidden.acts_in(rows, heads, tensor.device)[..., None, None], whole, edited)


def _check_point(hook: ColumnHook, point: PointContext) -> None:
    """Raise if the host names another point: what hides scores would leave minus infinity in a pattern."""
    own = "hook_attn_scores" if hook.site == "scores" else "hook_pattern"
    if point.name.startswith("blocks.") and not point.name.endswith(own):
        raise ValueError(f"{hook} belongs at {own} and was put at {point.name}; name that point")
