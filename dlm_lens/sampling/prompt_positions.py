"""Positions as people count them: from the prompt's first token, the padding on its left left out."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor


def from_prompt(
    table: pd.DataFrame,
    padding: Int[Tensor, "batch"] | None,
    canvas: int,
    names: Sequence[str] = ("position",),
    rows: str = "batch",
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
    return table
