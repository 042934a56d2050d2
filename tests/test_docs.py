"""Every Python block of the README and the docs runs as a reader would paste it, and draws the picture shown."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dlm_lens import AboveMean, families, find_sinks, load, record
from dlm_lens.recording.reducer_registry import REDUCERS
from tests import pages
from tests.pages import ROOT, blocks, outputs, run_blocks, run_commands, shown, shows_outputs, stale, with_outputs
from tests.printed import differences

RECIPES = sorted((ROOT / "docs").glob("add-a-*.md"))
"""Pages that name files to be written; their own tests follow them in a scratch copy (tests/recipes.py)."""
FAMILIES = sorted((ROOT / "docs" / "families").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *FAMILIES]
REFERENCE = [page for page in PAGES if page not in RECIPES]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=_name(page), marks=pytest.mark.long)
        for page in PAGES
        if blocks(page) and page not in RECIPES and page.name != "README.md"
    ],
)
def test_the_page_runs(page: Path, tmp_path: Path) -> None:
    printed = run_blocks(page, tmp_path)
    renew = f"run `python -m tests.pages {_name(page).removeprefix('docs/')}`"
    assert not stale(tmp_path), renew
    if shows_outputs(page):
        for fresh, stored in zip(printed, outputs(page), strict=True):
            found = differences(shown(fresh), stored)
            assert not found, f"{renew}: {found}"
    else:
        assert not any(outputs(page)), "random models printed this, not those that the page names"


def test_the_readme_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = blocks(ROOT / "README.md")
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102  # our own page
    (printed,) = re.findall(r"^```text\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == printed
    assert len(readme.splitlines()) < 150


def test_the_readme_of_the_wheel_runs(capsys) -> None:
    (block,) = blocks(ROOT / "dlm_lens" / "README.md")
    exec(compile(block, "dlm_lens/README.md", "exec"), {})  # noqa: S102  # our own page
    assert capsys.readouterr().out.startswith("['5 + 4 = 9 . answer 9 .']")


def test_an_output_is_stored_below_its_block_and_a_close_one_stays() -> None:
    text = "a\n```python\nprint(0.51)\n```\nb\n\n```python\nx = 1\n```\n\n```text\nold\n```\nc\n"
    once = with_outputs(text, ["0.51\n", ""])
    assert once == "a\n```python\nprint(0.51)\n```\n\n```text\n0.51\n```\nb\n\n```python\nx = 1\n```\nc\n"
    assert with_outputs(once, ["0.512 \n", ""]) == once
    assert "\n0.61\n" in with_outputs(once, ["0.61\n", ""])
    long = shown("\n".join(map(str, range(34))))
    assert long.splitlines()[-2:] == ["26", "... (7 more lines)"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["pictures.md", "report.md", "trajectories.md"])
def test_the_commands_run(name: str, tmp_path: Path) -> None:
    run_commands(ROOT / "docs" / name, tmp_path)
    assert not stale(tmp_path), f"run `python -m tests.pages {name}`"


def test_a_stale_picture_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    monkeypatch.setattr(pages, "IMAGES", stored)
    narrow, wide = "[8.476, 10]", "[2.253, 16.22]"
    for folder, interval in ((stored, narrow), (tmp_path / "other", wide), (tmp_path / "same", narrow)):
        folder.mkdir(exist_ok=True)
        figure = Figure(figsize=(6, 3), dpi=90)
        figure.suptitle(f"mean lead 9.238 {interval} steps")
        figure.savefig(folder / "lead.png")
    assert not pages.stale(tmp_path / "same")
    assert list(pages.stale(tmp_path / "other")) == ["lead.png"]


@pytest.mark.long
def test_the_numbers_of_the_pictures_are_those_of_the_page() -> None:
    page = " ".join((ROOT / "docs" / "pictures.md").read_text(encoding="utf-8").split())
    (prompts,) = re.findall(r"prompts = (\[.*?\])", page)
    rec = record(load("toy-ar"), ast.literal_eval(prompts), seed=0)
    found = int(find_sinks(rec, AboveMean(3.0)).is_sink.sum())
    scores = int((~rec.received.isnan()).sum())
    assert f"`toy-ar` has {found} sinks among {scores:,} scores" in page


def test_the_table_of_reducers_has_their_texts() -> None:
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `(\w+)\([^`]*\)` \| `([^`]*)` \|", page, flags=re.MULTILINE))
    assert {kind: text.replace("\\|", "|") for kind, text in shown.items()} == {
        entry.kind: entry.usage for entry in REDUCERS.values()
    }


TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *TASKS], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", REFERENCE, ids=_name)
def test_files_named_in_commands_exist(page: Path) -> None:
    for target in re.findall(
        r"\b((?:tests|benchmarks|experiments|docs|dlm_lens)/[\w/.-]+\.(?:py|md))\b", page.read_text()
    ):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_every_family_has_a_row_and_a_page_that_shows_it() -> None:
    table = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(families/(\w+)\.md\) \|", table, flags=re.MULTILINE))
    assert set(rows) == {family.name for family in families()}
    assert {page.stem for page in FAMILIES} == set(rows.values())
    for name, page in rows.items():
        text = (ROOT / "docs" / "families" / f"{page}.md").read_text(encoding="utf-8")
        assert f"`{name}`" in text.splitlines()[0]
        assert blocks(ROOT / "docs" / "families" / f"{page}.md")
        hub_names = next(family for family in families() if family.name == name).hub_names
        assert not hub_names or any(hub_name in text for hub_name in hub_names)
        assert all(hub_name.split("/")[0] in text for hub_name in hub_names), f"{page} does not name an owner"


def test_the_architecture_names_files_and_rooms_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for target in re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", page):
        places = (ROOT / "dlm_lens" / target, ROOT / target)
        assert any(place.exists() for place in places), f"architecture.md names {target}"
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    for room in re.findall(r"dlm_lens\.(\w+)", " ".join(contract["layers"])):
        assert re.search(rf"\b{room}\b", page), f"architecture.md does not name {room}"
