"""Hostile tokens stay inert and look the same in tables, terminals, figures, pages and reports."""

import io
import json
import re
import warnings
from dataclasses import replace
from weakref import WeakSet
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.text import Text
from tqdm import tqdm
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.probes import logit_lens
from dlm_lens.recording import Recording
from dlm_lens.sampling.token_text import StoredTokenizer, shown
from dlm_lens.testing import tiny
from dlm_lens.viz.figures import labels
from dlm_lens.viz.figures.labels import caption, note
from dlm_lens.viz.views.view import Piece, View

HOSTILE = [
    "\x1b[2J\x1b[31m", "\x1b]0;owned\x07", "\x00", "\x9b31m", "\x7f", "\u202eevil", "\u2066\u2069", "\ufeff",
    "\ud800", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&lt;b&gt;", "$\\frac{1}{0}$", "$",
    "$$a^{", "\\textbf{x", "\n\n", "\t", "\r", " the", "   ", "", "[bold red]x[/]", "{}%#&~_^", "你好",
    "\u05e9\u05dc", "\u200b", "x" * 5000, "\"'`", "%%DATA%%",
]  # fmt: skip
RULE = dl.AboveMean(0.2)


class Decodes:
    """A tokenizer whose tokens are hostile."""

    all_special_ids = ()
    mask_token_id = eos_token_id = None

    def decode(self, ids, **_):
        return "".join(HOSTILE[int(i) % len(HOSTILE)] for i in ids)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    model = tiny("llada")
    prompt = [list(range(len(HOSTILE)))]
    rec = dl.record(
        model, prompt, [dl.recording.ReceivedAttention(min_viewers=1)], steps=3, gen_length=6, block_length=6
    )
    words = {int(i): Decodes().decode([i]) for i in rec.run.canvases.unique()}
    rec = replace(rec, run=replace(rec.run, tokenizer=Decodes()), words=words)
    model.tokenizer = Decodes()
    kept = {token: word for token, word in words.items() if "\ud800" not in word}
    path = replace(rec, words=kept).save(tmp_path_factory.mktemp("hostile") / "rec")
    return model, rec, path


def inert(text, lines=True):
    """Whether nothing in a text is a command or turns its direction."""
    return all(c.isprintable() or (lines and c == "\n") for c in text)


def cells(table):
    for name in table:
        for value in table[name]:
            yield from value if isinstance(value, list) else [value]


def test_tables(hostile):
    model, rec, _ = hostile
    found = dl.find_sinks(rec, dl.TopK(20))
    for table in (found.table(), dl.trajectories(rec, RULE).table(), logit_lens(model, rec.run, top=20).table()):
        words = [cell for cell in cells(table) if isinstance(cell, str)]
        assert words
        assert all(inert(word, lines=False) and len(word) <= 40 for word in words)
        assert inert(table.to_string())
    seen = {shown(word) for word in rec.words.values()}
    assert set(found.table()["token"]) <= seen
    assert len(set(found.table()["token"])) > 10


def test_terminal(hostile, monkeypatch):
    model, rec, path = hostile
    monkeypatch.setattr("dlm_lens.adapters.load", lambda *_, **__: model)
    # A bar that another test left unfinished has the first line: tqdm would move the cursor to a second one.
    monkeypatch.setattr(tqdm, "_instances", WeakSet())
    loaded = Recording.load(path)
    assert isinstance(loaded.run.tokenizer, StoredTokenizer)
    for arguments in (
        ["sinks", path, "--detector", "top-k:20", "--top", "200"],
        ["lens", path, "--positions", ",".join(map(str, range(len(HOSTILE)))), "--lines", "100", "--top", "20"],
    ):
        for extra in ([], ["--json"]):
            result = CliRunner().invoke(cli.app, [*map(str, arguments), *extra], catch_exceptions=False)
            # A progress bar on stderr returns to the beginning of its line.
            assert inert(result.output.replace("\r", "\n"))
            assert "\\u001b[2J" in result.output.replace("\\\\", "\\")
        assert json.loads(result.stdout)
    for line in dl.viz.emerging_lines(rec.run):
        assert inert(line.plain, lines=False)


@pytest.mark.long
def test_figures_take_nothing_for_markup(hostile):
    model, rec, _ = hostile
    figures = [
        dl.viz.incoming_attention(rec, layer=0, head=0, title=HOSTILE[12]),
        dl.viz.sink_positions(rec, RULE, layer=0, head=0, title=HOSTILE[14]),
        dl.viz.attention_maps(model, rec.run, steps=[0, 1], layer=0, head=0, detector=RULE, title=HOSTILE[13]),
        dl.viz.lens_table(logit_lens(model, rec.run), step=1, title=HOSTILE[15]),
    ]
    for figure in figures:
        figure.savefig(io.BytesIO(), format="png")
        figure.savefig(io.BytesIO(), format="svg")
        held = figure.findobj(lambda a: hasattr(a, "get_parse_math"))
        assert all(inert(artist.get_text()) for artist in held)
        with_dollar = [a for a in held if "$" in a.get_text() and "A_{ij}" not in a.get_text()]
        assert with_dollar
        assert not any(a.get_parse_math() or a.get_usetex() for a in with_dollar)
    assert note(figures[0].axes[0], "$x$") is None


def test_captions_are_well_formed_in_svg(hostile):
    _, rec, _ = hostile
    figure = dl.viz.incoming_attention(rec, layer=0, head=0, title="\x1b[31m\0\x07\u202eX-->\n<x>")
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    assert ElementTree.fromstring(file.getvalue()).tag.endswith("svg")
    captions = [artist.get_text() for artist in figure.findobj(lambda one: hasattr(one, "get_parse_math"))]
    assert any(r"\u001b[31m\u0000\u0007\u202eX-->" in text for text in captions)
    assert all(map(inert, captions))


def test_pages_take_nothing_for_markup(hostile, tmp_path):
    model, rec, _ = hostile
    views = [
        dl.viz.received_tokens(rec, layer=0, head=0),
        dl.viz.emerging_text(rec.run),
        dl.viz.attention_heads(rec.run, model, step=0, layer=0),
    ]
    for view in views:
        labels = [label for piece in view.pieces for label in piece.props["tokens"]]
        assert all(inert(label, lines=False) and len(label) <= 41 for label in labels)
        page = view.save(tmp_path / "view.html").read_text()
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert inert(page.split("CircuitsVis.render(", 1)[1].rsplit("</script>", 1)[0])
        assert "<img src=x" not in view._repr_html_()
    page = dl.viz.report(rec, tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    words = data["recordings"][0]["texts"]
    assert all(inert(word, lines=False) for word in words)
    assert inert(data["recordings"][0]["text"].replace("\t", ""))
    # A word in a page is the word in a table, but for its length.
    assert {word for word in words if len(word) <= 40} >= {
        word for word in dl.find_sinks(rec, dl.TopK(20)).table()["token"] if not word.endswith("…")
    }


def test_errors_and_warnings_of_commands_are_inert(monkeypatch, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 1, "\x9b2J\u202e": "\x7f"}')
    for arguments in (
        ["record", "toy", "--prompts", str(prompts), "--out", str(tmp_path / "out")],
        ["sinks", "not\x1b]0;x\x07there"],
        ["sinks", str(tmp_path), "--detector", "\x9b2J"],
    ):
        monkeypatch.setattr("sys.argv", ["dlm-lens", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        out, err = capsys.readouterr()
        text = out + err.replace("\x1b[31m", "", 1).replace("\x1b[0m", "", 1)
        assert inert(text)
        assert "\\u" in text or "\\x" in text

    def fail(*_, **__):
        raise ValueError("weights model.\x1b[31m.\x00layers\x07\u202e.q_proj are not of this model")

    monkeypatch.setattr("dlm_lens.recording.Recording.load", fail)
    (tmp_path / "header.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["dlm-lens", "sinks", str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main()
    assert "weights model.\\u001b[31m.\\u0000layers\\u0007\\u202e.q_proj" in capsys.readouterr().err


@pytest.mark.parametrize("title", ["你好 🙂", "\x1b[31m\x00\u202e\ud800"])
def test_a_title_has_codes_for_what_the_font_lacks_and_no_warning(hostile, title: str) -> None:
    _, rec, _ = hostile
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of every missing glyph
        figures = [
            dl.viz.incoming_attention(rec, layer=0, head=0, title=title),
            dl.viz.sink_positions_by_model({title: rec}, RULE, heads={title: (0, 0)}, title=title),
        ]
        for figure in figures:
            figure.savefig(io.BytesIO(), format="svg")
    for figure in figures:
        texts = [one.get_text() for one in figure.findobj(Text)]
        coded = "\\u4f60\\u597d \\U0001f642" if title.isprintable() else "\\u001b[31m\\u0000\\u202e\\ud800"
        assert any(coded in text for text in texts)
        assert all(inert(text) for text in texts)


def test_a_font_that_has_the_characters_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_drawable", lambda character, font: character != "你" or "Mono" in font)
    assert caption(["你好"], 6.0) == "\\u4f60好"
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", "DejaVu Sans Mono"]}):
        assert caption(["你好"], 6.0) == "你好"


def test_a_view_holds_no_lone_surrogate() -> None:
    view = View("\ud800", ("\x1b",), (Piece("ColoredTokens", {"tokens": ["a"], "values": [1.0]}, "<\udc80>"),))
    page = view._repr_html_()
    for coded in ("\\ud800", "\\u001b", "&lt;\\udc80&gt;"):
        assert coded in page
    page.encode()  # as a notebook stores it
