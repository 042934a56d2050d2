"""`mask_random`: a control that hides random columns, as many as another hook or with as much attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import store_plain_numbers
from dlm_lens.attention import (
    ColumnHook,
    ColumnMask,
    ColumnStats,
    DelegatingColumnHook,
    HidesNothing,
    Hook,
    PointContext,
    Stage,
    as_hook,
    is_hook,
    top_columns,
)
from dlm_lens.hooks.base import call_of, check_stage, makes_hook
from dlm_lens.hooks.limits import Limited
from dlm_lens.hooks.positions import Classes, checked_classes, columns_of_classes
from dlm_lens.hooks.sink_masking import MaskSinks
from dlm_lens.hooks.sink_sources import columns_of_pass
from dlm_lens.hooks.window import KeepOnly
from dlm_lens.placement import float64_device, in_float64
from dlm_lens.sinks.token_classes import TOKEN_CLASSES

Match = Literal["columns", "mass"]
"""What is matched to the other hook: the number of hidden columns, or the attention that they receive."""


ON_CANVAS = tuple(name for name in TOKEN_CLASSES if name != "learned sink")
"""The classes of `classes=`: learned sink tokens are never chosen."""


@dataclass(frozen=True, repr=False)
class MaskRandom(DelegatingColumnHook):
    """Hide random columns; build it with `mask_random`.

    Raises:
        ValueError: neither k nor a hook that hides columns, both, or a mass that cannot be matched.
    """

    k: int | None = None
    like: ColumnHook | None = None
    seed: int = 0
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False
    match: Match = "columns"
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_stage(self.stage, self.renormalise)
        object.__setattr__(self, "classes", checked_classes(self.classes, ON_CANVAS))
        if (self.k is None) == (self.like is None):
            raise ValueError(f"mask_random(k={self.k!r}, like={self.like!r}): give one of the two")
        if self.k is not None and (isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1):
            raise ValueError(f"mask_random(k={self.k!r}): k must be a whole number of at least 1")
        object.__setattr__(self, "like", _column_hook(self.like))
        if self.like is not None and (self.stage, self.renormalise, self.keep_self) != (
            "before_softmax",
            False,
            False,
        ):
            raise ValueError("mask_random(like=...) takes stage, renormalise and keep_self from the hook")
        if self.match not in get_args(Match):
            raise ValueError(f"match is {self.match!r}; it must be one of {', '.join(map(repr, get_args(Match)))}")
        if self.match == "mass" and (self.like is None or isinstance(_innermost(self.like), KeepOnly)):
            raise ValueError(
                f"mask_random(k={self.k!r}, like={self.like!r}, match='mass'): a mass is matched to like=, a hook "
                "that hides the same columns from every query, such as mask_top_sinks(1)"
            )

    def __repr__(self) -> str:
        return call_of(self, "mask_random")

    stateless = False

    @property
    def inner(self) -> ColumnHook:
        """The hook of `like`; the random numbers depend on the row's own positions only."""
        return HidesNothing(self.stage) if self.like is None else self.like

    @property
    def remembers(self) -> bool:
        """As `like`: the choice depends on the present step alone."""
        return self.inner.remembers

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask | None:
        """Random content positions, as `match` says, other than the columns that `like` hides."""
        content = _content(keys, columns, hook)
        may = content[:, None]
        if self.classes is not None:
            may = may & columns_of_classes(self.classes, keys, hook, self).to(content.device)
        if self.like is None:
            assert self.k is not None
            drawn = _random_numbers(self.seed, content, _heads(columns, hook), hook)
            chosen = top_columns(drawn.masked_fill(~may, torch.nan), self.k)
            return ColumnMask(chosen, self.stage, self.keep_self, self.renormalise, most=self.k)
        real = self.like.hidden(keys, columns, hook)
        if real is None:
            return None
        wanted = real.columns.to(content.device)
        gone = wanted & (content | hook.sinks.is_sink(keys, content.device))[:, None]
        free = may & ~wanted
        drawn = _random_numbers(self.seed, content, wanted.shape[1], hook)
        order = drawn.masked_fill(~free, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        if self.match == "columns":
            ranked = torch.arange(keys, device=order.device) < gone.sum(-1, keepdim=True)
        else:
            mass = _received(self.like, keys, columns, hook, wanted.shape[1]).to(order.device)
            ranked = _nearest(mass.expand(order.shape).gather(-1, order), free.gather(-1, order), mass, gone)
        chosen = torch.zeros_like(free).scatter(-1, order, ranked) & free
        return replace(real, columns=chosen, most=real.most if self.match == "columns" else None, leaves_one=False)


@makes_hook
def mask_random(
    k: int | None = None,
    *,
    like: Any = None,
    seed: int = 0,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
    match: Match = "columns",
    classes: Classes = None,
) -> MaskRandom:
    """Hide random columns: the control for a hook that chooses columns by a rule.

    With `like=hook`, in every map as many columns as that hook would hide there (content and learned sink tokens),
    at its site, stage, steps, layers, heads and part of the model, but never the columns that it would hide; all
    others if they are too few. With `k`, that many in every head. Only content positions of the canvas are chosen,
    never padding or learned sink tokens.

    With `match="mass"`, columns that receive as much attention as those of the hook, T = sum_j r_j over its
    columns: in random order, every column that keeps the sum of r_j at or below T; then the smallest of the others,
    if it brings the sum nearer to T. For `mask_sinks`, r_j are the statistics that it ranks by (its `source` and
    `per`); for other hooks, and for sinks measured before, those of this pass before the control acts. If all
    others together receive less than T, all of them are hidden. `run.settings["mass_hidden"]` has the attention
    that was hidden.

    The choice depends on seed, step, layer, head, and the row's prompt with positions counted from its first token.
    So it is the same in both halves of guidance, and in any batch in which a row has the steps that it has alone:
    where the number of steps depends on the tokens (thresholds, block diffusion), a row waits for others. Outside a
    run the step is 0 and all rows have the same choice.

    Args:
        k: number of columns in every head; None with `like`.
        like: the hook to match; None with `k`.
        seed: seed of the choice.
        stage: with `k`, "before_softmax" or "after"; `like` has its own.
        renormalise: with "after", rows sum to 1 again.
        keep_self: no query loses its own position.
        match: with `like`, "columns" or "mass".
        classes: choose only among positions whose token at this step belongs to one of these classes of
            `mask_sinks`; all of them if they are too few, or receive too little. None for all. What is matched,
            the number or the mass, is always that of all columns of `like`.

    Raises:
        ValueError: neither k nor like, both, a hook that hides no columns, match="mass" with `keep_only`, which
            hides other columns from every query, or an unknown class; "learned sink" is none here.
    """
    return MaskRandom(k, like, seed, stage, renormalise, keep_self, match, checked_classes(classes, ON_CANVAS))


def _column_hook(hook: Any) -> ColumnHook | None:
    """The hook of `like=`, a user's own object adapted.

    Raises:
        ValueError: it hides no columns.
    """
    if hook is None:
        return None
    column = as_hook(hook) if is_hook(hook) else None
    if not isinstance(column, ColumnHook):
        raise ValueError(f"mask_random(like={hook!r}): it must be a hook that hides columns")
    return column


def _innermost(hook: Hook | None) -> Hook | None:
    """The hook inside `at_steps`, `at_layers`, `at_heads` and `at_progress`."""
    while isinstance(hook, Limited):
        hook = hook.hook
    return hook


def _received(
    like: ColumnHook, keys: int, columns: Callable[[], ColumnStats], hook: PointContext, heads: int
) -> Float[Tensor, "batch #head key"]:
    """R_j by which the mass is matched; the mean over heads if the same columns are hidden in all heads."""
    inner = _innermost(like)
    if isinstance(inner, MaskSinks):
        sums = inner.received(keys, columns, hook)
    else:
        sums = columns_of_pass(columns, hook, f"mask_random(like={like!r}, match='mass')").sums
    return in_float64(sums if sums.shape[1] == heads else sums.mean(1, keepdim=True))


def _nearest(
    ordered: Float[Tensor, "batch #head key"],
    free: Bool[Tensor, "batch #head key"],
    mass: Float[Tensor, "batch #head key"],
    gone: Bool[Tensor, "batch #head key"],
) -> Bool[Tensor, "batch #head key"]:
    """Which of the columns in random order to hide, so that their mass is nearest to that of `gone`.

    Args:
        ordered: what each column receives, in random order.
        free: which of them may be chosen; these come first.
        mass: what each column receives, in the canvas's order.
        gone: the columns whose mass is matched, in the canvas's order.
    """
    gap = (mass * gone).sum(-1, keepdim=True)
    left = free & gone.any(-1, keepdim=True)
    taken = torch.zeros_like(left)
    # In rounds up to the first that does not fit. The gap only shrinks: a column once skipped never fits later.
    while bool((fits := left & (ordered <= gap)).any()):
        now = fits & ((ordered * fits).cumsum(-1) <= gap)
        taken, left = taken | now, fits & ~now
        gap = gap - (ordered * now).sum(-1, keepdim=True)
    others = ordered.masked_fill(~free | taken, torch.inf)
    last = torch.zeros_like(taken).scatter(-1, others.argmin(-1, keepdim=True), True)
    return taken | last & (others < 2 * gap)


def _content(keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> Bool[Tensor, "batch key"]:
    """Content positions of the canvas, in the network's order; outside a run, those that any query sees.

    On a device with float64, in which columns are ordered and matched.
    """
    layout, run = hook.sinks, hook.run
    if run is None:
        given = columns()
        content = (given.viewers > 0).any(1).expand(len(given.sums), keys)
        content = content & ~layout.is_sink(keys, content.device)
        return content.to(float64_device(content.device))
    content = torch.zeros(len(run.valid), keys, dtype=torch.bool, device=run.valid.device)
    content[:, layout.canvas(keys)] = run.valid
    return content.to(float64_device(content.device))


def _heads(columns: Callable[[], ColumnStats], hook: PointContext) -> int:
    config = None if hook.run is None else hook.run.config
    known: int | None = getattr(config, "num_attention_heads", None)
    return known or columns().sums.shape[1]


def _random_numbers(
    seed: int, content: Bool[Tensor, "batch key"], heads: int, hook: PointContext
) -> Float[Tensor, "batch head key"]:
    """Random numbers of every head and position, the same for a row in any batch, with any room for masks."""
    run, device = hook.run, content.device
    position = content.cumsum(-1) - 1
    row = torch.zeros(len(content), dtype=torch.long, device=device)
    if run is not None:
        tokens, prompt = run.tokens.to(device), run.prompt.to(device)
        row = (_mixed(_mixed(prompt.cumsum(-1) - 1) + tokens) * prompt).sum(-1)
    key = torch.full((), seed, device=device)
    for number in (0 if run is None else run.step, hook.index or 0):
        key = _mixed(key + number)
    head = _mixed(key + torch.arange(heads, device=device))
    return _mixed(_mixed(head[:, None] + row[:, None, None]) + _mixed(position)[:, None]).double()


def _mixed(value: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of every number (the finaliser of splitmix64), the same on every device."""
    value = value + -0x61C8864680B583EB
    value = (value ^ (value >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    value = (value ^ (value >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return value ^ (value >> 31 & (1 << 33) - 1)
