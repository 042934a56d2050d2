"""`by_row`: positions that are counted in the text of every row, so that each row may have its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.arguments import plain_number, store_plain_numbers
from dlm_lens.attention import PointContext, RunStep, padding_before, run_of


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
