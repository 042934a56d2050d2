"""Markdown pages that lie outside `docs/`: copies for the site, and the links to them."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from dlm_lens_site.files import DOCS, PAGES, ROOT

COPIED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    **{
        f"dlm_lens/checkpoints/{name}/README.md": f"checkpoints/{name}.md"
        for name in ("toy", "toy-ar", "toy-gated", "toy-sink")
    },
}
"""Path in the repository -> page below `docs/_pages`."""

_LINK = re.compile(r"(?<!`)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def copies() -> dict[str, str]:
    """The copied pages, their links rewritten."""
    pages = {}
    for path, page in COPIED.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        text = rewritten(text, (ROOT / path).parent, (PAGES / page).parent)
        # A model card begins with the hub's metadata, which is no page's.
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
        orphan = "---\norphan: true\n---\n\n" if page.startswith("checkpoints/") else ""
        pages[page] = orphan + text
    return pages


def links_of_a_page(_app: Sphinx, name: str, source: list[str]) -> None:
    """Let the links of a page of `docs/` that lead to a copied page lead to the copy."""
    if not name.startswith("_pages/"):
        folder = (DOCS / name).parent
        source[0] = rewritten(source[0], folder, folder)


def rewritten(text: str, origin: Path, place: Path) -> str:
    """Markdown whose relative links were written for one folder, for another; copied pages are linked as copies."""

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(origin / match[1]))
        inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if inside in COPIED:
            path = PAGES / COPIED[inside]
        elif inside == "README.md":
            path = DOCS / "index.md"
        elif origin == place:
            return match[0]
        return f"]({os.path.relpath(path, place)}{match[2] or ''})"

    return _LINK.sub(target, text)
