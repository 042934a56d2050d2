"""The page docs/add-a-family.md, followed literally in a scratch copy of the package."""

from pathlib import Path

import pytest

from tests.recipes import ROOT, follow, scratch_copy


@pytest.mark.long
def test_the_family_of_the_page_works_everywhere_without_another_edit(tmp_path: Path) -> None:
    scratch = scratch_copy(tmp_path)
    before = {path: path.read_bytes() for path in (scratch / "dlm_lens").rglob("*.py")}
    printed = follow(ROOT / "docs" / "add-a-family.md", scratch)
    assert "'masked_qwen3'" in printed  # in dl.families()
    assert "backbone.embed_tokens.weight" in printed  # saved under the authors' names
    assert printed.count("masked_qwen3") > 1  # on the command line too
    after = {path: path.read_bytes() for path in (scratch / "dlm_lens").rglob("*.py")}
    new = scratch / "dlm_lens" / "adapters" / "families" / "masked_qwen3.py"
    assert after.pop(new)
    assert after == before
