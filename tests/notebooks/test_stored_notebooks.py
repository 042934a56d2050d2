"""What is in the files of docs/notebooks, without running them."""

import base64
import io
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.notebooks.execution import FOLDER, NOTEBOOKS, read, source_of
from tests.notebooks.head import METADATA, badge, install, with_head

ROOT = FOLDER.parents[1]
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


@each
def test_it_begins_with_a_badge_and_installs(path: Path) -> None:
    notebook = read(path)
    title, first = notebook["cells"][:2]
    assert re.match(r"# \S[^\n]*\n\n", source_of(title))
    assert badge(path.name) in source_of(title).splitlines()
    assert source_of(first) == install(path.name)
    assert notebook["metadata"] == METADATA
    renewed = with_head(notebook, path.name)["cells"]
    cells = [
        [(cell["id"], cell["metadata"], cell["source"]) for cell in every] for every in (renewed, notebook["cells"])
    ]
    assert cells[0] == cells[1], "run `make notebooks`"


@each
def test_its_outputs_are_small_and_quiet(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 400_000
    assert sum(each.stat().st_size for each in NOTEBOOKS) < 3_000_000
    assert "unpkg.com" not in text
    outputs = [output for cell in read(path)["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no picture"
    for output in outputs:
        assert output.get("name") != "stderr"
        shown = output.get("data", {"text/plain": output.get("text")})
        words = "".join("".join(value) for kind, value in shown.items() if kind != "image/png")
        assert not re.search(r"<script|https?:|/tmp|/work|/home|/root| at 0x|\dit/s|Warning", words), words[:200]
        if "image/png" in shown:
            assert Image.open(io.BytesIO(base64.b64decode(shown["image/png"]))).width <= 1800


@each
def test_its_links_lead_somewhere(path: Path) -> None:
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", source_of(cell)):
                assert (FOLDER / target).exists(), f"{path.name} links to {target}"


def test_every_notebook_has_a_line_in_the_index() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.ipynb)\)", index)) == {path.name for path in NOTEBOOKS}
