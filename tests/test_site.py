"""The site's own parts: every error sentence, every picture, every public name has its place."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import dlm_lens as dl
from dlm_lens.sampling import algorithms
from dlm_lens.testing import tiny

pytest.importorskip("sphinx", reason="the site needs the extra docs")
from dlm_lens_site import (
    api_pages,
    docstrings,
    error_pages,
    error_sentences,
    gallery,
    references,
    repository_pages,
    sampler_pages,
)
from dlm_lens_site import structure as structure_of_site

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def sentences():
    return error_sentences.all_sentences()


def pattern(text: str) -> re.Pattern[str]:
    """A sentence of the site as a regular expression: … stands for anything."""
    return re.compile(".*".join(map(re.escape, text.split(error_sentences.VALUE))), re.DOTALL)


@pytest.mark.long
def test_every_raise_with_a_sentence_is_read(sentences):
    """The number of `raise` statements by a search that knows nothing of the syntax tree."""
    found, unread = sentences
    places = {(one.module, one.line) for one in found} | {(one.module, one.line) for one in unread}
    for path in error_sentences.source_files():
        module = error_sentences.module_name(path)
        inside = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            inside ^= line.count('"""') % 2 == 1
            if not inside and re.match(r"\s*raise _?\w+\(", line):
                assert (module, number) in places, f"{path}:{number} is on no page of errors"
    # What is left has no sentence for a user: attribute protocols, exit codes, private signals that are caught; a
    # BatchError repeats the sentence of its cause.
    left = {re.sub(r"\W.*", "", one.code.removeprefix("raise ")) for one in unread}
    signals = {"_LeftError", "_RepeatedNameError", "yaml"}  # the reader of a YAML file makes a sentence of the last
    assert left <= {"AttributeError", "BatchError", "typer", "ValueError"} | signals, left
    assert [one.code for one in unread if "ValueError" in one.code] == ["raise ValueError(str(cause)) from None"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("provoke", "module"),
    [
        (lambda: dl.load("toy", mask_token_id=10**6), "adapters"),
        (lambda: dl.denoise(tiny("llada"), [[1, 2]], gen_length=7, block_length=3), "sampling"),
        (lambda: dl.denoise(tiny("llada"), [], gen_length=8), "sampling"),
        (lambda: dl.AboveMean(eps="three"), "sinks"),
        (lambda: dl.find_sinks("text", dl.TopK(1)), "sinks"),
        (lambda: dl.record(tiny("llada"), [[1, 2]], [dl.ValueNorm(), dl.ValueNorm()], gen_length=8), "recording"),
        (lambda: dl.hooks.mask_positions(), "hooks"),
        (lambda: dl.viz.lens_table("lens", step=0), "viz"),
    ],
)
def test_an_error_that_is_raised_is_found_by_its_sentence(sentences, provoke, module):
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        provoke()
    fitting = [one for one in sentences[0] if pattern(one.text.split("  [")[0]).fullmatch(str(caught.value))]
    assert any(one.kind == caught.type.__name__ for one in fitting), str(caught.value)
    rooms = {room for one in fitting for room in one.module.split(".")[1:2]}  # the package itself has none
    assert rooms & {module, "arguments", "option_values"}


@pytest.mark.long
def test_every_sentence_has_a_cause_and_one_place(sentences):
    pages = error_pages.error_pages()
    index = pages.pop("search/errors.js")
    for one in sentences[0]:
        group = error_pages.group_of(one.module)
        assert group.cause
        assert group.remedy
        page, anchor = pages[f"errors/{group.page}.md"], error_pages.anchor_of(one)
        assert page.count(f"({anchor})=") == 1
        assert f"_pages/errors/{group.page}.html#{anchor}" in index
    rooms = {path.parent.name for path in (ROOT / "dlm_lens").glob("*/__init__.py")}
    prefixes = {prefix for group in error_pages.GROUPS for prefix in group.modules}
    assert rooms <= prefixes, f"no group of errors for {rooms - prefixes}"


def test_every_sampler_and_setting_is_on_the_page_of_the_samplers():
    page = sampler_pages.sampler_page()["samplers.md"]
    for name, algorithm in algorithms().items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.{6,}) \|$", section, re.MULTILINE)
        assert [row[0] for row in rows] == [one.name for one in dataclasses.fields(algorithm.settings)]
    assert "| `block_length` | `128` (a2d_qwen3); `32` (modernbert) | tokens of a block" in page
    assert "| [`duo_psi`](#duo_psi) | [duo](../families/duo.md) |" in page


def test_every_public_name_is_in_the_reference():
    pages = api_pages.api_pages()
    for room, module in api_pages.rooms().items():
        for name in module.__all__:
            value = getattr(module, name)
            full = (
                api_pages.public_names().get(f"{value.__module__}.{value.__qualname__}")
                if callable(value)
                else None
            )
            wanted = full or f"dlm_lens.{room}.{name}"
            page = pages[f"api/{wanted.split('.')[1]}.rst"]
            assert re.search(rf"^\.\. \S+:: {re.escape(wanted)}$", page, re.MULTILINE), wanted


def test_every_picture_has_code_that_makes_it():
    shown = {Path(picture.path).name: picture for picture in gallery.pictures()}
    stored = {path.name for path in (ROOT / "docs" / "images").rglob("*.png")}
    assert stored <= set(shown), f"in no page: {stored - set(shown)}"
    for name, picture in shown.items():
        assert re.search(r"dl\.viz|viz\.|dlm-lens|python -m", picture.code), (
            f"{name} of {picture.page}: {picture.code}"
        )
    assert "axis-clock" in shown["axis-clock-layers.png"].code
    assert "sink_causes" in shown["sink-causes.png"].code
    assert "attention-maps.png" in shown["attention-maps.png"].code


def test_every_page_is_in_one_section():
    listed = [page for pages in structure_of_site.sections().values() for page in pages]
    assert len(listed) == len(set(listed))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    pages |= {f"tasks/{path.stem}" for path in (ROOT / "docs" / "tasks").glob("*.md")}
    assert pages | {f"notebooks/{path.stem}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")} <= set(
        listed
    )


@pytest.mark.parametrize(
    ("code", "full"),
    [
        ("dl.find_sinks(received, rule)", "dlm_lens.sinks.find_sinks"),
        ("hooks.mask_sinks", "dlm_lens.hooks.mask_sinks"),
        ("AboveMean(eps=3.0)", "dlm_lens.sinks.AboveMean"),
        ("record", None),  # a word, not a name
        ("dl.record", "dlm_lens.recording.record"),
        ("run.texts", None),
        ("sinks.nothing", None),
    ],
)
def test_full_name(code, full):
    assert references.full_name(code) == full


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("`Sinks` of x_t, *axes and |k|", r"``Sinks`` of x_t, \*axes and \|k\|"),
        ("ends in name_ here", r"ends in name\_ here"),
        ("kept: ``a*b`` and `*c`", "kept: ``a*b`` and ``*c``"),
    ],
)
def test_docstrings_are_text(text, escaped):
    assert docstrings.escaped(text) == escaped


def test_links_to_copied_pages():
    docs = ROOT / "docs"
    text = "[a](../benchmarks/README.md#memory), [b](sinks.md), [c](https://x.org), [d](../README.md)"
    found = repository_pages.rewritten(text, docs, docs)
    assert found == "[a](_pages/benchmarks.md#memory), [b](sinks.md), [c](https://x.org), [d](index.md)"
    moved = repository_pages.rewritten(
        "![p](image.png) [q](../docs/sinks.md)", ROOT / "benchmarks", docs / "_pages"
    )
    assert moved == "![p](../../benchmarks/image.png) [q](../sinks.md)"


def test_the_moving_picture_is_small_and_moves():
    image = importlib.import_module("PIL.Image").open(ROOT / "docs" / "images" / "moving-sink.gif")
    assert image.n_frames == 21
    assert (ROOT / "docs" / "images" / "moving-sink.gif").stat().st_size < 500_000
