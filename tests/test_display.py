"""Results in a notebook and in a terminal: what they hold is shown, and no token is markup or a command."""

import inspect
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console

import dlm_lens as dl
from dlm_lens.display import COLUMNS, FILLS, ROWS, Cell, Line, Preview, ShowsItself
from dlm_lens.evaluation import Evaluation
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.sinks import AboveMean
from dlm_lens.testing import tiny
from tests.viz.test_hostile_tokens import HOSTILE, Decodes

PROBLEM = "tom has 5 apples . tom buys 4 more . how many apples ? :"
RUN: dict[str, Any] = {"steps": 8, "gen_length": 16}


@pytest.fixture(scope="module")
def run() -> dl.DenoisingRun:
    return dl.denoise(dl.load("toy"), PROBLEM, **RUN)


@pytest.fixture(scope="module")
def results(run: dl.DenoisingRun, tmp_path_factory: Any) -> list[Any]:
    model = dl.load("toy")
    recording = dl.record(model, [PROBLEM] * 2, [dl.ReceivedAttention(), dl.ValueNorm()], **RUN)
    sinks = dl.find_sinks(recording, AboveMean(3.0))
    stored = tmp_path_factory.mktemp("recorded") / "run"
    dl.record(model, PROBLEM, [dl.ValueNorm()], to=stored, **RUN)
    return [
        run, recording, sinks, dl.trajectories(recording, AboveMean(3.0)), dl.value_norms(recording, sinks),
        dl.compare(model, PROBLEM, hooks=[mask_top_sinks(3)], **RUN), dl.logit_lens(model, recording.run, sinks),
        dl.replay(model, run, hooks=[mask_top_sinks(1)]), Evaluation((), {}),
        dl.log_likelihood(model, [PROBLEM], [" answer 9"], samples=8), dl.received_of(recording),
        dl.probes.commitment(model, run), dl.probes.serial_depth(model, positions=8),
        dl.probes.sink_anatomy(model, run, AboveMean(1.0)), dl.hooks.capture(model, run, "resid", cache_steps=0),
        dl.hooks.mean_activations(model, PROBLEM, "z", **RUN), dl.recording.RecordingSet(stored),
    ]  # fmt: skip


def terminal(result: Any, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(result)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Reader(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_every_result_shows_its_headline_and_its_table_in_both_media(results: list[Any]) -> None:
    for result in results:
        page, text = result._repr_html_(), terminal(result)
        assert {tag for tag, _ in Reader(page).elements}.isdisjoint({"script", "img", "iframe"})
        headline = " ".join(repr(result).split())
        assert headline in " ".join(" ".join(Reader(page).words).split()).replace("\u200b", "")
        assert headline[:60] in " ".join(text.split())
        table = result._preview().table
        if table is not None and len(table):
            first = [str(name) for name in table.columns[:COLUMNS]]
            assert [word for word in Reader(page).words if word in first][: len(first)] == first
            assert all(name in text for name in first)
            assert page.count("<tr>") - len(result._preview().lines) == 1 + min(ROWS, len(table))


def test_every_public_result_with_a_table_shows_itself() -> None:
    rooms = (dl, dl.probes, dl.sinks, dl.recording, dl.sampling, dl.evaluation)
    classes = {found for room in rooms for name in room.__all__ if inspect.isclass(found := getattr(room, name))}
    with_table = {found for found in classes if callable(getattr(found, "table", None))}
    assert len(with_table) > 20
    assert {found.__name__ for found in with_table if not issubclass(found, ShowsItself)} == set()


def test_the_strip_is_what_every_step_decided(run: dl.DenoisingRun) -> None:
    elements = Reader(run._repr_html_()).elements
    areas: dict[tuple[str, float], float] = {}
    for tag, attributes in elements:
        if tag == "rect":
            key = attributes["fill"], float(attributes["fill-opacity"])
            areas[key] = areas.get(key, 0.0) + float(attributes["width"]) * float(attributes["height"]) / 36
    answer = slice(run.prompt_length, None)
    assert areas[FILLS["new"]] == run.unmasked[:, 0, answer].sum()
    assert areas[FILLS["open"]] == run.masked[1:, 0, answer].sum()
    assert sum(areas.values()) == run.steps * 16


def test_the_lines_are_the_texts_of_the_steps(run: dl.DenoisingRun) -> None:
    text = terminal(run)
    shown = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.startswith("step ")]
    assert [int(line.split()[1]) for line in shown] == [0, 1, 3, 4, 6, 7]
    expected = [line.plain for line in dl.viz.emerging_lines(run, steps=[0, 1, 3, 4, 6, 7])]
    assert [line.split("  ", 1)[1].rstrip() for line in shown] == expected


def test_hostile_tokens_are_text(run: dl.DenoisingRun) -> None:
    hostile = replace(run, tokenizer=Decodes())
    encodable = [text for text in HOSTILE if text.isprintable() or text.isascii()]  # pandas holds no lone surrogate
    table = pd.DataFrame({text: [text, text] for text in encodable})

    class Hostile(ShowsItself):
        def __repr__(self) -> str:
            return "".join(HOSTILE)

        def _preview(self) -> Preview:
            return Preview((Line(HOSTILE[0], [Cell(text) for text in HOSTILE]),), (), table, note=HOSTILE[0])

    for result in (hostile, Hostile()):
        page, text = result._repr_html_(), terminal(result)
        tags = {tag for tag, _ in Reader(page).elements}
        assert tags <= {"div", "style", "table", "tr", "td", "th", "thead", "tbody", "span", "svg", "title", "rect"}
        assert not re.search("[\x1b\u202e]", page)
        assert not re.search("\x1b\\[2J|\u202e", text)
    assert "[bold red]x[/]" in terminal(Hostile(), 10_000)  # not read as markup
    assert "<script>alert(1)</script>" in "".join(Reader(Hostile()._repr_html_()).words)


def test_a_run_of_many_rows_and_positions_shows_a_part() -> None:
    steps, width = 300, 1000
    unmasked = torch.zeros(steps, 2, width, dtype=torch.bool)
    unmasked[torch.arange(steps), :, torch.arange(steps)] = True
    masked = torch.ones(steps + 1, 2, width, dtype=torch.bool)
    masked[1:] = ~unmasked.cumsum(0).bool()
    long = dl.DenoisingRun(
        canvases=torch.arange(width).expand(steps + 1, 2, width), masked=masked,
        proposals=torch.zeros(steps, 2, width, dtype=torch.long), confidence=torch.zeros(steps, 2, width),
        unmasked=unmasked, attention_mask=torch.ones(2, width, dtype=torch.bool), prompt_length=0,
        spans=((0, width),) * steps, blocks=(0,) * steps, settings={"sampler": "llada"},
    )  # fmt: skip
    page = long._repr_html_()
    assert len(page) < 60_000
    assert "row 0 of 2" in page
    assert "more" in page
    assert 'height="384"' in page  # 64 of 300 steps
    assert 'width="960"' in page  # 160 of 1,000 positions


def test_a_comparison_of_a_batch_shows_a_row_that_changes() -> None:
    """It showed row 0, whose answers are equal, beside a headline that counts changes."""
    model = tiny("llada")
    plain = dl.denoise(model, [[5, 6, 7], [8, 9, 10]], steps=4, gen_length=4)
    canvases = plain.canvases.clone()
    canvases[-1, 1, 4] = (canvases[-1, 1, 4] + 1) % 60
    pair = dl.sampling.Comparison(plain, replace(plain, canvases=canvases), ())
    assert pair.tokens_changed.tolist() == [0, 1]
    page = pair._repr_html_()
    assert page.count('class="revised"') == 1
    assert "row 1 of 2" in page
    assert f'<span class="revised">w{int(canvases[-1, 1, 4])}</span>' in page
    assert "row 0 of 2" in dl.sampling.Comparison(plain, plain, ())._repr_html_()
