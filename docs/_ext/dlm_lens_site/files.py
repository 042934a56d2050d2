"""Places in the repository, and writing only what changed."""

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2]
ROOT = DOCS.parent
PAGES = DOCS / "_pages"
"""What is generated; git-ignored."""


def write_pages(pages: Mapping[str, str]) -> None:
    """Write pages by name below `docs/_pages`; one that did not change keeps its time and is not read again."""
    for name, text in pages.items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
