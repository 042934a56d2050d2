"""Every Python block of the README and the docs runs, page by page, as a reader would paste it."""

import linecache
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        # As in a notebook cell, whose source linecache knows: nnsight reads the blocks that it traces.
        name = f"{page.name}:{number}"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), space)  # noqa: S102  # our own page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    for target in re.findall(
        r"\b((?:tests|benchmarks|experiments|docs|dlm_lens)/[\w/.-]+\.(?:py|md))\b", page.read_text()
    ):
        assert (ROOT / target).exists(), f"{page.name} names {target}"
