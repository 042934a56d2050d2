"""Positions of tables from the prompt's first token, beside those of the canvas."""

import pandas as pd
import torch

from dlm_lens.sampling.prompt_positions import from_prompt


def lines() -> pd.DataFrame:
    """Two rows of a canvas of 6 positions; -1 is none, 6 a learned sink token."""
    return pd.DataFrame({"batch": [0, 1, 1, 1, 1], "position": [0, 1, 4, 5, 6], "came_from": [3, -1, 1, 6, 2]})


def test_positions_count_from_the_first_token_and_the_canvas_has_its_own_column() -> None:
    table = from_prompt(lines(), torch.tensor([0, 1]), 6, ("position", "came_from"))
    assert list(table) == ["batch", "position", "canvas_position", "came_from", "canvas_came_from"]
    shown = {name: [None if pd.isna(value) else int(value) for value in table[name]] for name in table}
    assert shown["position"] == [0, 0, 3, 4, None]
    assert shown["canvas_position"] == [0, 1, 4, 5, None]
    assert shown["came_from"] == [3, -1, 0, None, 1]
    assert shown["canvas_came_from"] == [3, -1, 1, None, 2]


def test_without_padding_there_is_one_column() -> None:
    for padding in (None, torch.zeros(2, dtype=torch.long)):
        table = from_prompt(lines(), padding, 7, ("position", "came_from"))
        pd.testing.assert_frame_equal(table, lines())
