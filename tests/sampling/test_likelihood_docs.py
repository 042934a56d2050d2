"""The blocks of docs/likelihood.md run on the embedded model and say what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "likelihood.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    space: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)  # noqa: S102
    bound, chain, greedy = space["bound"], space["chain"], space["greedy"]
    for right, wrong in (bound.value.tolist(), chain.value.tolist()):
        assert right > -1
        assert wrong < right - 3
    # The answer goes wrong at the fifth token, "8".
    assert chain.losses[1].argmax() == 4
    assert greedy.is_greedy.tolist() == [True, False]
    assert "5 + 4 = 9 . answer 9 ." in capsys.readouterr().out
