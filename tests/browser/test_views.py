"""circuitsvis views in a real browser: they draw, offline, and hostile tokens are text."""

from types import SimpleNamespace

import pytest

from dlm_lens.viz.views.view import Piece, View, web_labels

pytestmark = pytest.mark.browser

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "<!--<script>",
    "&lt;b&gt;&amp;",
    "\u2028\u202eevil",
    "你好",
]


def labels():
    return web_labels(list(range(len(HOSTILE))), SimpleNamespace(decode=lambda ids: HOSTILE[ids[0]]))


@pytest.fixture
def page(chromium, tmp_path):
    tokens = labels()
    values = [float(i) for i in range(len(tokens))]
    square = [[0.1 * i + 0.01 * j for j in range(len(tokens))] for i in range(len(tokens))]
    view = View(
        HOSTILE[1],
        (HOSTILE[0],),
        (
            Piece("ColoredTokens", {"tokens": tokens, "values": values, "minValue": -5, "maxValue": 5}, HOSTILE[1]),
            Piece("AttentionPattern", {"tokens": tokens, "attention": square, "maskUpperTri": False}),
            Piece("AttentionHeads", {"tokens": tokens, "attention": [square, square], "maskUpperTri": False}),
        ),
    )
    path = view.save(tmp_path / "view.html")
    page = chromium.new_page()
    page.complaints, page.asked = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.resolve().as_uri())
    page.wait_for_selector(".colored-tokens", timeout=60_000)
    page.wait_for_selector("canvas", timeout=60_000)
    yield page
    assert page.complaints == []
    assert page.asked == [path.resolve().as_uri()]
    page.close()


def test_tokens_are_shown_as_text(page):
    shown = page.eval_on_selector_all(".colored-tokens > span > span", "cells => cells.map(c => c.textContent)")
    assert [text.replace("\xa0", " ") for text in shown] == labels()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.inner_text("h1") == HOSTILE[1]


def test_patterns_are_drawn_above_the_diagonal_too(page):
    """circuitsvis hides the upper triangle unless told otherwise; there grey would stand."""
    canvases = page.locator("canvas").count()
    assert canvases == 1 + 2 + 1
    grey = page.evaluate(
        """() => { const c = document.querySelector("canvas"), t = c.getContext("2d");
        const d = t.getImageData(0, 0, c.width, c.height).data; let grey = 0, blue = 0;
        for (let i = 0; i < d.length; i += 4) {
          if (d[i + 3] > 250 && d[i] === 200 && d[i + 1] === 200 && d[i + 2] === 200) grey++;
          if (d[i + 3] > 250 && d[i + 2] > d[i] + 20) blue++; }
        return [grey, blue]; }"""
    )
    assert grey[0] == 0
    assert grey[1] > 1000
