"""The blocks of docs/sinks.md run, in order, and print what the comments beside them say."""

import re
from pathlib import Path

import pytest

import dlm_lens
from dlm_lens.testing import tiny

PAGE = Path(__file__).parents[2] / "docs" / "sinks.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.long
def test_every_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # What is checked here is the page, not the embedded model.
    monkeypatch.setattr(dlm_lens, "load", lambda name: tiny("llada"), raising=False)
    space = {}
    for block in blocks():
        exec(compile(block, str(PAGE), "exec"), space)  # noqa: S102
    printed = capsys.readouterr().out
    for line in (
        "Sinks(1 of 64 columns by AboveMean(eps=3.0); scale: relative to uniform; level: head; queries: all; "
        "head=1, key=64)",
        "0     0        62  8.875      3.875  relative to uniform  head",
        "tensor([0]) tensor(4.7439)",
        "tensor([-1]) tensor(1.)",
        "16 3.8125 23.83%",
        "64 3.9531 6.18%",
        "128 3.9766 3.11%",
        "512 3.9941 0.78%",
        "head 8.5 1",
        "layer 2.875 0",
        "model 2.875 0",
    ):
        assert line in printed
    assert (tmp_path / "incoming.png").stat().st_size > 10_000
    assert (tmp_path / "positions.png").stat().st_size > 10_000


def test_the_even_share_of_the_first_causal_key():
    assert sum(1 / n for n in range(1, 65)) / 64 == pytest.approx(0.074, abs=5e-4)
