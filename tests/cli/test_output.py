"""Tables as JSON: every digit, and null for what is none."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from dlm_lens.cli.output import show_tables


def test_tables_as_json_have_all_digits_of_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """pandas' own JSON has ten digits after the point: a probability of 1e-12 was 0."""
    small = np.float32(1.2345678e-12)
    table = pd.DataFrame(
        {
            "share": [1 / 3, 1.23456789e-12, math.nan, math.inf],
            "score": np.array([small, 10.565479, math.nan, 2], dtype=np.float32),
            "position": pd.array([7, pd.NA, 0, 2**40], dtype="Int64"),
            "masked": [True, False, True, False],
            "token": ["w1", None, "\u2028", "x"],
            "steps": np.arange(4),
        }
    )
    show_tables(True, {"rule": "none"}, {"sinks": table, "none": table[:0]})
    found = json.loads(capsys.readouterr().out)
    assert found["none"] == []
    assert [line["share"] for line in found["sinks"]] == [1 / 3, 1.23456789e-12, None, None]
    assert [line["score"] for line in found["sinks"]] == [float(small), float(np.float32(10.565479)), None, 2.0]
    assert [line["position"] for line in found["sinks"]] == [7, None, 0, 2**40]
    assert [line["masked"] for line in found["sinks"]] == [True, False, True, False]
    assert [line["token"] for line in found["sinks"]] == ["w1", None, "\u2028", "x"]
    assert [line["steps"] for line in found["sinks"]] == [0, 1, 2, 3]
