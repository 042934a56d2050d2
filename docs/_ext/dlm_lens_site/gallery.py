"""The gallery: every picture of the pages, with the code beside it on its page."""

import re
from dataclasses import dataclass
from pathlib import Path

from sphinx.application import Sphinx

from dlm_lens_site.files import DOCS

_IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\)", re.MULTILINE)
_BLOCK = re.compile(r"^(```(\w*)\n.*?^```)", re.MULTILINE | re.DOTALL)
_CODE = ("python", "bash", "console", "")
_NO_CODE = {"index.md"}


@dataclass(frozen=True)
class Picture:
    """A picture on a page.

    Args:
        page: name of the page's file.
        heading: title of the section that it is in.
        path: its path from `docs/`.
        text: what it shows.
        code: the fenced block that makes it.
    """

    page: str
    heading: str
    path: str
    text: str
    code: str


def pictures() -> list[Picture]:
    """The pictures of all pages, those of results last."""
    pages = sorted(DOCS.glob("*.md"), key=lambda page: (page.stem.startswith("results"), page.name))
    return [picture for page in pages if page.name not in _NO_CODE for picture in _of_page(page)]


def _of_page(page: Path) -> list[Picture]:
    text = page.read_text(encoding="utf-8")
    blocks = [(match.start(), match[1]) for match in _BLOCK.finditer(text) if match[2] in _CODE]
    prose = _BLOCK.sub(_blank, text)
    headings = [(match.start(), match[1]) for match in re.finditer(r"^#+ (.+)$", prose, re.MULTILINE)]
    found = []
    for match in _IMAGE.finditer(text):
        place = match.start()
        heading = next((title for start, title in reversed(headings) if start < place), page.stem)
        code = _code(Path(match[2]).name, place, blocks)
        found.append(Picture(page.name, heading, match[2], match[1], code))
    return found


def _blank(match: re.Match[str]) -> str:
    """A block of the same length without lines that look like headings."""
    return re.sub(r"[^\n]", " ", match[0])


def _code(name: str, place: int, blocks: list[tuple[int, str]]) -> str:
    """The block that names the file, the experiment's command below, or the nearest block above or below."""
    naming = [block for _, block in blocks if name in block]
    above = [block for start, block in blocks if start < place]
    below = [block for start, block in blocks if start > place]
    commands = [block for block in below if "dlm-lens experiment " in block]
    if naming:
        return naming[0]
    if not _is_result(name) and above:
        return above[-1]
    return (commands or above[-1:] or below)[0]


def _is_result(name: str) -> bool:
    return bool(re.match(r"(axis|beyond|fig\d+|table\d|one-token)-", name))


def add_the_pictures(_app: Sphinx, name: str, source: list[str]) -> None:
    """Append the pictures to the page `gallery`, a section for every page that has some."""
    if name != "gallery":
        return
    page = heading = ""
    for picture in pictures():
        if picture.page != page:
            page, heading = picture.page, ""
            title = (DOCS / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            source[0] += f"\n\n## {title}\n\nFrom [{title}]({page}).\n"
        if picture.heading != heading and page.startswith("results"):
            heading = picture.heading
            source[0] += f"\n### {heading}\n"
        source[0] += f"\n![{picture.text}]({picture.path})\n\n*{picture.text}*\n\n{picture.code}\n"
