"""docs/add-a-detector.md, followed literally in a scratch copy of the package."""

import pytest

from tests.recipes import ROOT, follow, scratch_copy


@pytest.mark.long
def test_the_recipe_adds_a_detector_that_works_everywhere(tmp_path):
    printed = follow(ROOT / "docs" / "add-a-detector.md", scratch_copy(tmp_path))
    assert "2 passed" in printed
    assert "columns by AboveMad(k=3); scale: relative to uniform" in printed
    assert "AboveMad" in (tmp_path / "from_python.html").read_text()
    assert (tmp_path / "from_the_command_line.html").stat().st_size > 10_000
