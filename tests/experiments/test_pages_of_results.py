"""Numbers with intervals on other pages are those of the page of results, which the experiments write."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?"
INTERVAL = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")


def section(text: str, begin: str) -> str:
    """The text after `begin`, up to the next heading of the second level."""
    return re.sub(r"\s*\n\s*", " ", text[text.index(begin) + len(begin) :].split("\n## ")[0])


def same(shown: tuple[str, ...], known: tuple[str, ...]) -> bool:
    """Whether numbers are the known ones, which may have more digits."""
    digits = [len(one.partition(".")[2]) for one in shown]
    return all(
        abs(float(a) - float(b)) <= 0.51 * 10**-d + 1e-9 for a, b, d in zip(shown, known, digits, strict=True)
    )


@pytest.mark.parametrize(
    ("page", "experiment"),
    [
        ("anatomy", "axis-anatomy"),
        ("features", "axis-features"),
        ("pruning", "axis-pruning"),
        ("clock", "axis-clock"),
        ("attribution", "axis-circuits"),
        ("early_attention", "axis-early"),
    ],
)
def test_intervals_are_those_of_the_results(page: str, experiment: str) -> None:
    results = (DOCS / "results_axis.md").read_text(encoding="utf-8")
    known = INTERVAL.findall(section(results, f"\n## {experiment}\n"))
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    shown = INTERVAL.findall(section(text, f"`dlm-lens experiment {experiment}"))
    assert len(known) > 20
    assert len(shown) > 3
    assert [one for one in shown if not any(same(one, other) for other in known)] == []


def test_the_page_of_smollm2_has_the_intervals_of_the_results() -> None:
    """Its tables: a line names its experiment, and the lines without one are of Table 1."""
    pages = [(DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("results", "results_one_token")]
    text = (DOCS / "results_smollm2.md").read_text(encoding="utf-8")
    checked = 0
    for line in (line for line in text.splitlines() if line.startswith("|") and INTERVAL.search(line)):
        named = re.search(r"`([\w-]+)` \|$", line)
        begin = f"\n## {named[1] if named else 'table1-masking'}\n"
        known = INTERVAL.findall(section(next(page for page in pages if begin in page), begin))
        shown = INTERVAL.findall(line)
        checked += len(shown)
        assert [one for one in shown if not any(same(one, other) for other in known)] == [], line
    assert checked > 20
    for path in re.findall(r"`(experiments/[\w/-]+)`", text):
        assert (DOCS.parent / path).is_dir(), path
