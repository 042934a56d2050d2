"""docs/add-a-reducer.md, followed literally in a scratch copy of the package."""

import pytest

from tests.recipes import ROOT, follow, scratch_copy


@pytest.mark.long
def test_the_recipe_adds_a_reducer_that_works_everywhere(tmp_path):
    printed = follow(ROOT / "docs" / "add-a-reducer.md", scratch_copy(tmp_path))
    assert "2 passed" in printed
    assert "Recording(key_alignment; step=4, batch=1" in printed
    assert "1 of 1 prompts recorded in many" in printed
    assert "Recording(key_alignment, received; step=4, batch=1" in printed
