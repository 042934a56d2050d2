"""Positions at which a hook of activations acts: canvas positions, learned sink tokens, or a class of positions."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.arguments import plain_number
from dlm_lens.attention import PointContext, RunStep, SinkToken, run_of
from dlm_lens.hooks.row_positions import RowPositions

PositionClass = Literal["masked", "visible", "prompt", "answer", "open", "decided"]
"""Positions that are masked at the step, that are not, of the prompt, or of the answer (AR: written by the run).

"open" is "masked" and "decided" is "visible", by the words that fit models without a mask token."""

Position = int | SinkToken | RowPositions
"""A canvas position (negative from the end), `sink(i)`, or positions of every row (`by_row`)."""

Positions = tuple[Position, ...] | PositionClass | None
"""Positions, a class of them, or None for every position."""

GivenPositions = Position | Sequence[Position] | PositionClass | None
"""Positions as a user gives them to a hook."""

ActivationSite = Literal["q", "k", "v", "z", "attn_out", "mlp_out", "resid"]
"""Sites whose activation is [batch, position, ...] in every host."""


def read_positions(positions: Any, who: str) -> Positions:
    """Positions as a hook stores them: a class, a tuple, or None.

    Raises:
        ValueError: an unknown class, no position, or a value that is not a position.
    """
    named: dict[Any, Positions] = {name: name for name in get_args(PositionClass)}
    if positions is None or (isinstance(positions, str) and positions in named):
        return None if positions is None else named[positions]
    positions = plain_number(positions)
    if isinstance(positions, Position):
        positions = (positions,)
    known = ", ".join(map(repr, get_args(PositionClass)))
    if isinstance(positions, str) or not isinstance(positions, Iterable):
        raise ValueError(f"{who}: positions is {positions!r}; give canvas positions, sink(i), or one of {known}")
    found = tuple(map(plain_number, positions))
    if not found:
        raise ValueError(f"{who}: no position; give at least one, or None for all")
    for position in found:
        if isinstance(position, bool) or not isinstance(position, Position):
            raise ValueError(
                f"{who}: {position!r} is no position; give canvas positions, sink(i), or one of {known}"
            )
    return found


def activation_site(site: str, who: str) -> None:
    """Check that the activation at a site is [batch, position, ...].

    Raises:
        ValueError: the site is not in `ActivationSite`.
    """
    if site not in get_args(ActivationSite):
        raise ValueError(f"{who}: site is {site!r}; it must be one of {', '.join(get_args(ActivationSite))}")


def run_rows(hook: PointContext, rows: int, positions: int) -> RunStep | None:
    """The run's step for `rows` rows of `positions` network positions; None outside a run.

    With an approximate cache the activation has the positions that the step computes, and so has the result.

    Raises:
        ValueError: the step has another number of positions.
    """
    if hook.run is None:
        return None
    run = hook.run.for_rows(rows)
    canvas = positions - hook.sinks.count
    if run.queries is not None and canvas != run.valid.shape[-1]:
        run = run.of_queries()
    if run.valid.shape[-1] != canvas:
        raise ValueError(
            f"the activation has {canvas} canvas positions and the run's step {run.valid.shape[-1]}; decode "
            "without a cache (use_cache=False)"
        )
    return run


def of_class(
    name: PositionClass,
    opened: Bool[Tensor, "*step row position"],
    content: Bool[Tensor, "row position"],
    answer: Bool[Tensor, "row position"],
) -> Bool[Tensor, "*step row position"]:
    """The positions of a class at a step, or at each of several, from the open ones, the content and the answer."""
    if name in ("masked", "open"):
        return opened & content
    if name in ("visible", "decided"):
        return content & ~opened
    return (content & (answer if name == "answer" else ~answer)).expand_as(opened)


def where(positions: Positions, tensor: Tensor, hook: PointContext, who: Any) -> Bool[Tensor, "row position"]:
    """Which positions of an activation [row, position, ...] are addressed; in a run, never padding.

    Positions are those of the canvas. With an approximate cache an activation may have only those that the
    step computes; outside a run, with a cache, only those that the pass computes or that the cache still holds.

    Raises:
        ValueError: a position that does not exist; a class outside a run; `sink(i)` in a bare call.
    """
    rows, length = tensor.shape[:2]
    run, layout = run_rows(hook, rows, length), hook.sinks
    if run is not None and hook.run is not None and run.tokens.shape[-1] != hook.run.tokens.shape[-1]:
        assert hook.run.queries is not None
        whole = torch.empty(rows, hook.run.tokens.shape[-1] + layout.count, device=tensor.device)
        return where(positions, whole, hook, who)[:, slice(*hook.run.queries)]
    reach = hook.reach
    if positions is not None and reach is not None and reach != length:
        found = where(positions, torch.empty(rows, reach, device=tensor.device), hook, who)
        chosen = torch.zeros(rows, length, dtype=torch.bool, device=tensor.device)
        # A static cache has room after the last position.
        chosen[:, :reach] = found[:, hook.missing(length) :]
        return chosen
    canvas = layout.canvas(length)
    chosen = torch.zeros(rows, length, dtype=torch.bool, device=tensor.device)
    if isinstance(positions, str):
        given = run_of(hook, who).for_rows(rows)
        chosen[:, canvas] = of_class(positions, given.masked, given.valid, given.answer).to(chosen.device)
    elif positions is None:
        chosen[:] = True
    else:
        check_sinks_known(positions, hook, who)
        for position in positions:
            if isinstance(position, RowPositions):
                chosen[:, canvas] |= position.on_canvas(rows, canvas.stop - canvas.start, hook, who).to(
                    chosen.device
                )
                continue
            place = layout.locate(position, length)
            chosen[:, place : place + 1] = True
    if run is not None:
        chosen[:, canvas] &= run.valid.to(chosen.device)
    return chosen


def spread(chosen: Tensor, tensor: Tensor) -> Tensor:
    """Values per [row, position], with as many axes as an activation."""
    return chosen.reshape(*chosen.shape, *[1] * (tensor.ndim - 2))


def check_sinks_known(positions: tuple[Position, ...], hook: PointContext, who: Any) -> None:
    """Check that the context knows where the model's sink tokens are, if there is one among the positions.

    Raises:
        ValueError: a sink token in a bare call.
    """
    if not hook.sinks_known and any(isinstance(position, SinkToken) for position in positions):
        raise ValueError(
            f"{who}: the position of a sink depends on the model; use dlm_lens.hooks.attach_hooks(model, ...)"
        )


def printed_call(name: str, site: str | None, positions: Positions, *more: str) -> str:
    """A hook of activations as the call that makes it; `more` are its other arguments."""
    parts = [] if site is None else [repr(site)]
    if positions is not None:
        parts.append(f"positions={positions!r}")
    return f"{name}({', '.join([*parts, *more])})"


def shown_tensor(tensor: Tensor) -> str:
    """A tensor in a hook's repr: its shape and norm, which distinguish two in a record."""
    return f"Tensor({list(tensor.shape)}, norm={float(tensor.detach().float().norm()):.4g})"
