"""docs/add-a-hook.md, followed literally in a scratch copy of the package."""

import pytest

from tests.recipes import ROOT, follow, scratch_copy


@pytest.mark.long
def test_the_recipe_adds_a_hook_that_works_everywhere(tmp_path):
    printed = follow(ROOT / "docs" / "add-a-hook.md", scratch_copy(tmp_path))
    assert "2 passed" in printed
    assert "('mask_later_blocks()',)" in printed
    assert "traced" in printed
    assert "at_layers(mask_later_blocks(ahead=2), [0, 1])" in printed
    assert "1 of 1 prompts recorded in run" in printed
    assert "('ClipNorm(most=20.0)',)" in printed
