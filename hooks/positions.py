"""Positions at which a hook of activations acts: canvas positions, learned sink tokens, or a class of positions.

`by_row` gives every row its own, counted from the row's first token. `classes=` of the sink hooks are columns whose
token at the step belongs to some classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor
from torch._guards import detect_fake_mode

from dlm_lens.arguments import plain_number, store_plain_numbers
from dlm_lens.attention import PointContext, RunStep, SinkToken, padding_before, run_of
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses


@dataclass(frozen=True)
class RowPositions:
    """Positions of every row, or of all rows alike; build it with `by_row`.

    Args:
        rows: for each row of a run its positions, from 0 at the row's first token or negative from the end; or one
            list for all rows.

    Raises:
        ValueError: no list, or something that is no position.
    """

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        given: tuple[Any, ...] = self.rows
        rows = tuple((row,) if isinstance(row, int) else row for row in given)
        if not rows or any(isinstance(row, str) or not isinstance(row, Iterable) for row in rows):
            raise ValueError(f"by_row{given!r:.80}: give a list of positions for each row: by_row([3, 4], [7])")
        rows = tuple(tuple(map(plain_number, row)) for row in rows)
        for position in (position for row in rows for position in row):
            if isinstance(position, bool) or not isinstance(position, int):
                raise ValueError(f"by_row: {position!r:.80} is no position; give whole numbers")
        object.__setattr__(self, "rows", rows)

    def __repr__(self) -> str:
        return f"by_row({', '.join(repr(list(row)) for row in self.rows)})"

    @property
    def alike(self) -> bool:
        """Whether all rows have the same positions."""
        return len(self.rows) == 1

    def on_canvas(self, rows: int, length: int, hook: PointContext, who: Any) -> Bool[Tensor, "row position"]:
        """Where they are on a canvas of so many positions; those that an AR run has yet to write are left out.

        Raises:
            ValueError: another number of rows, a row that has no such position, or outside a run, where the padding
                is not known.
        """
        run = run_of(hook, who).for_rows(rows)

        def compute() -> Tensor:
            self._check_rows(run, who)
            whole = length if run.whole is None else run.whole
            starts = padding_before(run.valid).tolist()
            ends = [length] * len(starts) if run.ends is None else run.ends.tolist()
            return self._placed(starts, ends, length, whole, who)

        found: Tensor = run.once(("by row", self, rows, length), compute)
        return found

    def check_run(self, run: RunStep, canvas: int, who: Any) -> None:
        """Refuse a run without these rows, or whose finished canvas of so many positions lacks one of them.

        Raises:
            ValueError: naming the row.
        """
        self._check_rows(run, who)
        starts = padding_before(run.valid).tolist()
        self._placed(starts, [canvas] * len(starts), canvas, canvas, who)

    def _check_rows(self, run: RunStep, who: Any) -> None:
        rows, count = len(run.tokens) // run.halves, len(self.rows)
        if count not in (1, rows):
            raise ValueError(f"{who}: positions for {count} rows, and the run has {rows}; give a list for each row")

    def _placed(
        self, starts: list[int], ends: list[int], length: int, whole: int, who: Any
    ) -> Bool[Tensor, "row position"]:
        chosen = torch.zeros(len(starts), length, dtype=torch.bool)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for position in self.rows[row % len(self.rows)]:
                place = position + (start if position >= 0 else end)
                if not start <= place < whole:
                    there = f"row {row} has {whole - start} positions after its padding"
                    raise ValueError(f"{who}: position {position} is not there; {there}")
                if place < length:
                    chosen[row, place] = True
        return chosen


def by_row(*rows: int | Iterable[int]) -> RowPositions:
    """Positions that are counted from the first token of every row, wherever its padding ends.

    `by_row([3, 4], [7])` is positions 3 and 4 of the first row and 7 of the second, in a run of two prompts;
    `by_row([3])` is position 3 of every row. Negative ones count from the end of the canvas that the network sees;
    where blocks are counted from the text, from the end of each row's own block. Hooks take it where they take
    positions: `mask_positions(by_row([3], [5]))`, `ablate("resid", by_row([3], [5]))`; they act in runs only, and
    with lists for several rows in one batch only.

    Args:
        *rows: a list of positions for each row, which may be empty; or one list for all rows.

    Raises:
        ValueError: no list, or something that is no position.
    """
    return RowPositions(tuple(rows))  # type: ignore[arg-type]


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

    Positions are those of the canvas; where a step sees a prefix, without those after it. With an approximate cache
    an activation may have only those that the step computes; outside a run, with a cache, only those that the pass
    computes or that the cache still holds.

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
            if is_to_come(position, length, hook):
                continue
            place = layout.locate(position, length)
            chosen[:, place : place + 1] = True
    if run is not None:
        chosen[:, canvas] &= run.valid.to(chosen.device)
    return chosen


def is_to_come(position: int | SinkToken, length: int, hook: PointContext) -> bool:
    """Whether the step sees a prefix of the run's canvas that ends before this position."""
    if hook.run is None or hook.run.whole is None or isinstance(position, SinkToken):
        return False
    canvas = hook.sinks.canvas(length)
    return canvas.stop - canvas.start <= position < hook.run.whole


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
    norm = "unknown" if detect_fake_mode(tensor) else f"{float(tensor.detach().float().norm()):.4g}"
    return f"Tensor({list(tensor.shape)}, norm={norm})"


def all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite; True in `lm.scan`, where a tensor has a shape and no numbers."""
    return detect_fake_mode(tensor) is not None or bool(tensor.isfinite().all())


Classes = str | Sequence[str] | None
"""What a user gives as `classes=`: names of `TOKEN_CLASSES`, one name, or None for all tokens."""


def checked_classes(classes: Any, known: Sequence[str] = TOKEN_CLASSES) -> tuple[str, ...] | None:
    """The names as a tuple, each once; None for all tokens. "open" is "mask": open positions, whatever they hold.

    Raises:
        ValueError: no name, or an unknown one.
    """
    if classes is None:
        return None
    names = (classes,) if isinstance(classes, str) else tuple(classes) if isinstance(classes, Sequence) else ()
    names = tuple("mask" if name == "open" and "mask" in known else name for name in names)
    if not names or any(name not in known for name in names):
        raise ValueError(f"classes is {classes!r:.200}; it must be one or several of {', '.join(map(repr, known))}")
    return tuple(dict.fromkeys(names))


def classes_of(run: RunStep) -> TokenClasses:
    """The classes of the run's token ids; every id is looked up once a run."""
    found: TokenClasses = run.memory.setdefault("classes of tokens", TokenClasses.of(run.config, run.tokenizer))
    return found


def columns_of_classes(
    classes: tuple[str, ...], keys: int, hook: PointContext, who: Any
) -> Bool[Tensor, "row 1 key"]:
    """The columns whose token at this step belongs to the classes, in the network's order of positions.

    Masked positions are "mask"; learned sink tokens "learned sink". In both halves of guidance the tokens are those
    of the canvas.

    Raises:
        ValueError: there is no run, or no tokenizer where a class needs one.
    """
    run = run_of(hook, who)

    def chosen() -> Bool[Tensor, "row position"]:
        try:
            return classes_of(run).among(run.tokens, run.masked, classes)
        except ValueError as error:
            raise ValueError(f"{who}: {error}") from None

    on_canvas = run.once(("tokens of classes", classes), chosen)
    found = torch.zeros(len(on_canvas), 1, keys, dtype=torch.bool, device=on_canvas.device)
    found[:, 0, hook.sinks.canvas(keys)] = on_canvas
    found[:, 0, hook.sinks.sinks(keys)] = "learned sink" in classes
    return found
