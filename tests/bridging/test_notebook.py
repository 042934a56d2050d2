"""The outputs of docs/notebooks/transformerlens.ipynb agree with its text."""

import pytest

from tests.tracing.notebook import NOTEBOOKS, executed
from tests.tracing.test_notebook import printed


@pytest.mark.long
def test_the_donor_s_digits_are_sorted_until_a_late_layer() -> None:
    (path,) = [path for path in NOTEBOOKS if path.name == "transformerlens.ipynb"]
    outputs = printed(executed(path))
    assert outputs[0].startswith("answer 1 2 4 9 .\n")
    (patched,) = [text for text in outputs if text.startswith("donor")]
    lines = dict(line.split(": ") for line in patched.splitlines())
    assert lines["donor"] == lines["after layer 0"] == "answer 3 5 7 8 ."
    assert lines["after layer 3"] == "answer 1 2 4 9 ."  # no other position reads the stream after the last layer
    (heads,) = [text for text in outputs if text.startswith("nothing off")]
    assert all("{'answer 1 2 4 9 .'}" in line for line in heads.splitlines()[1:])
