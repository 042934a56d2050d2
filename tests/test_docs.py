"""Every Python block of the README and the docs runs, page by page, as a reader would paste it."""

import ast
import linecache
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dlm_lens import AboveMean, families, find_sinks, load, record
from dlm_lens.testing import tiny

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs").glob("add-a-*.md"))
"""Pages that name files to be written; their own tests follow them in a scratch copy (tests/recipes.py)."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = [page for page in PAGES if page not in RECIPES]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def stand_ins(page: Path, directory: Path) -> None:
    """A small random model of the same classes in place of each released checkpoint that a page loads.

    A directory of a hub's name is found before the hub.
    """
    for name in set(re.findall(r"dl\.load\(\"([\w.-]+/[\w.-]+)\"", "\n".join(blocks(page)))):
        (family,) = [family for family in families() if name in family.hub_names]
        layouts = [model_type for model_type in family.layouts if model_type.split("-")[-1] in name.lower()]
        model = tiny(family.name, model_type=layouts[0] if layouts else None)
        model.tokenizer.chat_template = CHAT
        (directory / name).mkdir(parents=True)
        model.save_pretrained(directory / name)
        model.tokenizer.save_pretrained(directory / name)


CHAT = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.long)
        for page in PAGES
        if blocks(page) and page not in RECIPES and page.name != "README.md"
    ],
)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stand_ins(page, tmp_path)
    space: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        # As in a notebook cell, whose source linecache knows: nnsight reads the blocks that it traces.
        name = f"{page.name}:{number}"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), space)  # noqa: S102  # our own page


def test_the_readme_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102  # our own page
    (printed,) = re.findall(r"^```text\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == printed
    assert len(readme.splitlines()) < 150


@pytest.mark.long
@pytest.mark.parametrize("name", ["report.md", "trajectories.md"])
def test_the_commands_run(name: str, tmp_path: Path) -> None:
    """The shell blocks of a page, in order, in an empty directory; without Chromium those lines are left out."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)).splitlines()
    if shutil.which("chromium") is None:
        lines = [line for line in lines if not line.startswith("chromium")]
    tool = tmp_path / "bin" / "dlm-lens"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m dlm_lens.cli "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    (tmp_path / "empty").mkdir()
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(line.replace("chromium ", "chromium --no-sandbox ", 1) for line in lines)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path / "empty", env=os.environ | paths, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_numbers_of_the_pictures_are_those_of_the_page() -> None:
    page = " ".join((ROOT / "docs" / "pictures.md").read_text(encoding="utf-8").split())
    (prompts,) = re.findall(r"prompts = (\[.*?\])", page)
    rec = record(load("toy-ar"), ast.literal_eval(prompts), seed=0)
    found = int(find_sinks(rec, AboveMean(3.0)).is_sink.sum())
    scores = int((~rec.received.isnan()).sum())
    assert f"`toy-ar` has {found} sinks among {scores:,} scores" in page


TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *TASKS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    for target in re.findall(
        r"\b((?:tests|benchmarks|experiments|docs|dlm_lens)/[\w/.-]+\.(?:py|md))\b", page.read_text()
    ):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_the_architecture_names_files_and_rooms_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for target in re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", page):
        places = (ROOT / "dlm_lens" / target, ROOT / target)
        assert any(place.exists() for place in places), f"architecture.md names {target}"
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    for room in re.findall(r"dlm_lens\.(\w+)", " ".join(contract["layers"])):
        assert re.search(rf"\b{room}\b", page), f"architecture.md does not name {room}"
