"""Steps, rows and positions as people count them: in the whole run, from the prompt's first token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from dlm_lens.sampling.denoising_run import DenoisingRun


def of_whole_run(table: pd.DataFrame, run: "DenoisingRun", names: Sequence[str] = ("position",)) -> pd.DataFrame:
    """A table of steps, rows and positions of a run with the numbers of the whole run, and `from_prompt`.

    Tables of a part of a run then join with each other, whatever they are of.

    Args:
        table: its columns `step` and `batch`, if there are any, hold indices of the run's steps and rows.
        run: the run, or a part of one.
        names: the columns of positions.
    """
    if "step" in table:
        table["step"] = [run.step_numbers[step] for step in table["step"]]
    return from_prompt(table, run.padding, run.tokens.shape[1], names, numbers=run.rows or ())


def from_prompt(
    table: pd.DataFrame,
    padding: Int[Tensor, "batch"] | None,
    canvas: int,
    names: Sequence[str] = ("position",),
    rows: str = "batch",
    numbers: Sequence[int] = (),
) -> pd.DataFrame:
    """A table of canvas positions with positions that count from the prompt's first token.

    If any row has padding, a second column `canvas_position` (`canvas_came_from` for `came_from`) holds the canvas
    position, which indexes arrays; without padding the two are equal. A learned sink token, which is not on the
    canvas, has neither (NA).

    Args:
        table: with the columns `names`.
        padding: positions of padding before each row's first token; None for none.
        canvas: how many positions the canvas has.
        names: the columns; -1 and missing values stay as they are.
        rows: the column with the batch row of each line; without that column all lines are of row 0.
        numbers: the number of each row in the whole run, which that column gets; empty for 0, 1, ....
    """
    padded = padding is not None and bool((padding > 0).any())
    for name in names:
        index = table[name]
        if bool((index >= canvas).any()):
            table[name] = index = index.astype("Int64").mask(index >= canvas)
        if padding is None or not padded:
            continue
        at = table[rows].to_numpy(dtype=int) if rows in table else np.zeros(len(table), dtype=int)
        table.insert(list(table).index(name) + 1, f"canvas_{name}", index)
        table[name] = (index - padding.numpy()[at]).where(~(index < 0), index)
    if numbers and rows in table:
        table[rows] = [numbers[row] for row in table[rows]]
    return table
