"""docs/add-a-figure.md, followed literally in a scratch copy of the package."""

import pytest

from tests.recipes import ROOT, follow, scratch_copy


@pytest.mark.long
def test_the_recipe_adds_a_figure_that_works_everywhere(tmp_path):
    scratch = scratch_copy(tmp_path)
    printed = follow(ROOT / "docs" / "add-a-figure.md", scratch)
    assert "1 passed" in printed
    assert "sinks per head of every layer, step by step" in printed
    assert (scratch / "sinks-per-step.pdf").read_bytes().startswith(b"%PDF")
    assert (scratch / "sinks.png").read_bytes().startswith(b"\x89PNG")
