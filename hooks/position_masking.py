"""`mask_positions` and `mask_tokens`: hide keys from every query, by their positions or by their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.arguments import is_whole, store_plain_numbers
from dlm_lens.attention import ColumnHook, ColumnMask, ColumnStats, PointContext, RunStep, Stage, run_of
from dlm_lens.hooks.base import call_of, check_stage, makes_hook
from dlm_lens.hooks.positions import Position, RowPositions, check_sinks_known, classes_of, is_to_come

CLASSES: dict[str, tuple[str, ...]] = {
    "mask": (), "prompt": (), "eos": ("end of text",), "punctuation": ("punctuation",),
    "whitespace": ("whitespace",), "digits": ("digits",), "words": ("words",),
    "special": ("special", "end of text", "mask"), "open": (),
}  # fmt: skip
"""The classes of `mask_tokens`, and for those told by the token alone the `TOKEN_CLASSES` that they hold."""


@dataclass(frozen=True, repr=False)
class MaskPositions(ColumnHook):
    """Hide keys from all queries; build it with `mask_positions`.

    Raises:
        ValueError: no position, or an unknown stage.
    """

    positions: tuple[Position, ...]
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_stage(self.stage, self.renormalise)
        if not self.positions:
            raise ValueError(f"{self._maker} needs at least one position")
        given_positions: tuple[Any, ...] = self.positions
        for position in given_positions:
            if isinstance(position, list | tuple | range):
                given = ", ".join(map(repr, position)) if len(position) <= 8 else "*positions"
                raise ValueError(
                    f"{self._call_with(f'{position!r:.60}')} takes positions one by one: {self._call_with(given)}"
                )
            if isinstance(position, bool) or not isinstance(position, Position):
                raise ValueError(
                    f"{self._call_with(repr(position))}: a position is a whole number, sink(i) or by_row(...)"
                )

    def __repr__(self) -> str:
        return call_of(self, "mask_positions", ("positions",))

    stateless = True
    _maker: ClassVar[str] = "mask_positions"

    def _call_with(self, positions: str) -> str:
        """The call that has these positions, for errors."""
        return f"{self._maker}({positions})"

    @property
    def padding_safe(self) -> bool:
        """Whether left padding shifts no position, and no row has its own."""
        own = any(isinstance(position, RowPositions) and not position.alike for position in self.positions)
        return not self.shifts_with_padding and not own

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask:
        """The columns at the positions, in every head."""
        check_sinks_known(self.positions, hook, self)
        device = None if hook.run is None else hook.run.tokens.device
        of_rows = [position for position in self.positions if isinstance(position, RowPositions)]
        rows = len(hook.run.tokens) if of_rows and hook.run is not None else 1
        hidden, canvas = torch.zeros(rows, 1, keys, dtype=torch.bool, device=device), hook.sinks.canvas(keys)
        for each in of_rows:
            found = each.on_canvas(rows, canvas.stop - canvas.start, hook, self)
            hidden[:, 0, canvas] |= found.to(hidden.device)
        for position in self.positions:
            if isinstance(position, RowPositions):
                continue
            if is_to_come(position, keys, hook):
                continue
            missing = hook.missing(keys)
            place = hook.sinks.locate(position, keys + missing) - missing
            if place >= 0:
                hidden[..., place : place + 1] = True
        return ColumnMask(hidden, self.stage, self.keep_self, self.renormalise, most=self._most)

    @property
    def _most(self) -> int:
        return sum(max(map(len, each.rows)) if isinstance(each, RowPositions) else 1 for each in self.positions)


@makes_hook
def mask_positions(
    *positions: Position,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
) -> MaskPositions:
    """Hide the keys at `positions` (on the canvas, negative from the end; `sink(0)`; `by_row`) from every query.

    Before the softmax the other keys take over the attention; after it, the rows lose it and sum to less than
    1, unless `renormalise`. A row that would end empty keeps its own position; with `keep_self` every row does.
    Where a step sees a prefix of the canvas (AR decoding, block diffusion), a position after it is hidden from the
    first step on that sees it. Where blocks are counted from the text, a canvas ends with the longest row's last
    block, and positions from the end are none of a shorter row's; `by_row` counts from each row's own.

    Raises:
        ValueError: no position, or an unknown stage.
    """
    return MaskPositions(positions, stage, renormalise, keep_self)


@dataclass(frozen=True, repr=False)
class MaskTokens(ColumnHook):
    """Hide keys by their tokens; build it with `mask_tokens`.

    Raises:
        ValueError: no class, or an unknown one.
    """

    classes: tuple[str | int, ...]
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        check_stage(self.stage, self.renormalise)
        if not self.classes:
            raise ValueError(f"mask_tokens needs a class ({', '.join(CLASSES)}) or a token id")
        for one in self.classes:
            valid = one in CLASSES if isinstance(one, str) else is_whole(one) and one >= 0
            if not valid:
                raise ValueError(f"mask_tokens({one!r}): it must be a token id, or one of {', '.join(CLASSES)}")

    def __repr__(self) -> str:
        return call_of(self, "mask_tokens", ("classes",))

    padding_safe = True

    def check_run(self, run: RunStep) -> None:
        """Refuse token ids that are not in the model's vocabulary.

        Raises:
            ValueError: naming the id.
        """
        super().check_run(run)
        size = None if run.config is None else getattr(run.config.get_text_config(), "vocab_size", None)
        for one in self.classes:
            if size is not None and isinstance(one, int) and one >= size:
                raise ValueError(f"{self}: token id {one} is not in the vocabulary; ids go from 0 to {size - 1}")

    @property
    def stateless(self) -> bool:
        """Unless it hides the prompt, which a forward pass alone does not show."""
        return "prompt" not in self.classes

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask:
        """The positions, in all heads; learned sink tokens are not on the canvas and stay visible."""
        run = run_of(hook, self)
        hidden = torch.zeros(len(run.tokens), 1, keys, dtype=torch.bool, device=run.tokens.device)
        chosen = run.once(("chosen", self), lambda: self._chosen(run))
        hidden[:, 0, hook.sinks.canvas(keys)] = chosen
        most = run.once(("most", self), lambda: int(chosen.sum(-1).max()))
        return ColumnMask(hidden, self.stage, self.keep_self, self.renormalise, most=most)

    def _chosen(self, run: RunStep) -> Bool[Tensor, "row position"]:
        chosen = torch.zeros_like(run.masked)
        for one in self.classes:
            if one in ("mask", "open"):
                chosen = chosen | run.masked
            elif one == "prompt":
                chosen = chosen | run.prompt
            elif isinstance(one, int):
                chosen = chosen | ((run.tokens == one) & ~run.masked)
            else:
                chosen = chosen | (self._of_class(one, run) & ~run.masked)
        return chosen & run.valid

    def _of_class(self, one: str, run: RunStep) -> Bool[Tensor, "row position"]:
        try:
            return classes_of(run).among(run.tokens, torch.zeros_like(run.masked), CLASSES[one])
        except ValueError as error:
            raise ValueError(f"{self}: {error}; give token ids instead") from None


@makes_hook
def mask_tokens(
    *classes: str | int, stage: Stage = "before_softmax", renormalise: bool = False, keep_self: bool = False
) -> MaskTokens:
    """Hide keys from every query by their tokens at the step: classes of tokens, or token ids.

    "mask" or "open": positions that are still masked, or hold a random token. "prompt": the prompt. "eos": ids that
    end a text or a turn. "punctuation" (and symbols), "whitespace", "digits", "words": by the token's text, the
    classes of `token_enrichment`. "special": the tokenizer's special tokens. All classes but the first two and
    "prompt" exclude open positions, as token ids do.

    Raises:
        ValueError: no class, an unknown one, or an id below 0; in a run, an id that is not in the vocabulary.
    """
    return MaskTokens(classes, stage, renormalise, keep_self)
