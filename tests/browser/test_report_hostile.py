"""Tokens come from checkpoints and prompts of others: in the page they are text, whatever they say."""

import pytest
import torch

from dlm_lens.recording import record
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Received
from dlm_lens.testing import tiny
from dlm_lens.viz.reporting import report

pytestmark = pytest.mark.browser

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "<!--<script>",
    "]]><svg/onload=window.pwned=1>",
    "&lt;b&gt;&amp;",
    "\u2028\u2029",
    "\u202eevil\u202c",
    "\u2067\u05d0\u05d1\u2069",
    "\u05e9\u05dc\u05d5\u05dd",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "x" * 1000,
    "\ud800",
    "\x00\x1b[31m\x7f",
    "",
    "   ",
    "javascript:window.pwned=1",
    "${window.pwned=1}",
    "constructor",
    "%%DATA%%",
]
STEPS, KEYS = 3, len(HOSTILE)


class Hostile:
    def decode(self, ids, **_):
        return "".join(HOSTILE[i] for i in ids)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    tokens = torch.arange(KEYS)
    masked = torch.zeros(STEPS + 1, 1, KEYS, dtype=torch.bool)
    masked[0, :, :2] = True
    run = DenoisingRun(
        canvases=tokens.expand(STEPS + 1, 1, KEYS),
        masked=masked,
        proposals=tokens.expand(STEPS, 1, KEYS),
        confidence=torch.zeros(STEPS, 1, KEYS),
        unmasked=masked[:-1] & ~masked[1:],
        attention_mask=torch.ones(1, KEYS, dtype=torch.bool),
        prompt_length=0,
        spans=((0, KEYS),) * STEPS,
        blocks=(0,) * STEPS,
        settings={"sampler": HOSTILE[0], HOSTILE[1]: [HOSTILE[1], 2]},
        tokenizer=Hostile(),
    )
    generator = torch.Generator().manual_seed(0)
    received = Received(
        values=KEYS * torch.rand(STEPS, 1, 2, 2, KEYS, generator=generator).softmax(-1),
        expected=torch.ones(STEPS, 1, 1, 1, KEYS),
        counted=torch.full((STEPS, 1), KEYS),
        tokens=run.canvases[:-1],
        masked=run.masked[:-1],
        layers=(0, 1),
        tokenizer=Hostile(),
    )
    path = tmp_path_factory.mktemp("hostile") / "hostile.html"
    return report(
        (received, run),
        path,
        compare=(received, run),
        title=HOSTILE[0] + HOSTILE[1],
        labels=(HOSTILE[1], HOSTILE[6]),
    )


@pytest.mark.long
def test_hostile_tokens_are_text(page_file, opened):
    page = opened(page_file)
    for step in (0, 2):
        page.set("#step", step)
    page.set("#value", 0)
    page.click("summary >> nth=0")
    page.click("summary >> nth=1")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, svg, iframe, object, embed, link, b").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("document.title") == HOSTILE[0] + HOSTILE[1]
    assert page.text("h1") == HOSTILE[0] + HOSTILE[1]
    assert page.text(".pane:nth-child(1) h2") == HOSTILE[1]
    assert HOSTILE[0] in page.text("table.facts >> nth=0")


@pytest.mark.long
def test_what_hostile_tokens_look_like(page_file, opened):
    page = opened(page_file)
    page.set("#step", 2)
    cells = page.eval_on_selector_all(
        ".pane:first-child .cell",
        "cells => cells.map(c => [c.firstChild.tagName, c.firstChild.textContent, c.title.split('\\n')[0]])",
    )
    assert {tag for tag, _, _ in cells} == {"BDI"}
    shown, titles = [text for _, text, _ in cells], [title for _, _, title in cells]
    assert shown[0] == "</script><scr…"
    assert titles[0] == f"position 0: {HOSTILE[0]}"
    assert shown[4] == HOSTILE[4]
    assert shown[5] == "\\u2028\\u2029"
    assert shown[6] == "\\u202eevil\\u2…"  # what turns the direction around is written out
    assert shown[8] == HOSTILE[8]
    assert shown[9] == HOSTILE[9]  # one family, joined
    assert shown[10] == "x" * 13 + "…"
    assert titles[10].endswith("x" * 1000)
    assert shown[11] == "\\ud800"
    assert shown[12].startswith("\\u0000\\u001b")
    assert shown[13] == "∅"
    assert shown[14] == "␣␣␣"
    assert shown[18] == "%%DATA%%"
    widths = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.getBoundingClientRect().width)")
    assert max(widths) < 250
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.long
def test_the_policy_stops_what_would_get_in(chromium, page_file):
    """Were markup to get through, its script would not run, and nothing would be fetched."""
    page = chromium.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(page_file.resolve().as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate(
        """() => { document.body.insertAdjacentHTML("beforeend",
        `<img src="data:image/gif;base64,x" onerror="window.pwned=1"><p style="color: red" id="styled">x</p>`);
        const script = document.createElement("script");
        script.textContent = "window.pwned = 2"; document.body.append(script); }"""
    )
    fetched = page.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')")
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert fetched == "refused"
    assert sum("Content Security Policy" in line for line in refused) >= 3
    page.close()


@pytest.mark.long
def test_a_damaged_file_says_so(chromium, page_file, tmp_path):
    damaged = tmp_path / "damaged.html"
    text = page_file.read_text()
    place = text.index('"std":{"dtype":"f8"')
    start = text.index('"data":"', place) + len('"data":"')
    damaged.write_text(text[:start] + "AAAA" + text[start + 4 :])
    page = chromium.new_page()
    page.goto(damaged.resolve().as_uri())
    page.wait_for_selector("#problem:not([hidden])")
    assert "cannot be shown" in page.inner_text("#problem")
    page.close()


def test_a_part_says_between_which_steps_a_position_was_decoded(opened, tmp_path):
    whole = record(tiny("llada"), [[1, 2, 3]], steps=6, gen_length=6, block_length=6)
    page = opened(report(whole.select(step=[0, 3]), tmp_path / "part.html", row=0))
    titles = page.eval_on_selector_all(".cell", "cells => cells.map(cell => cell.title)")
    for key, step in list(enumerate(whole.run.step_of[0].tolist()))[3:]:
        when = f"at step {step}" if step in (0, 3) else "between step 0 and 3" if step < 3 else "after step 3"
        assert f"decoded {when}: " in titles[key]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keys_without_a_score_are_bluish_in_the_plot_over_steps(opened, tmp_path, scheme):
    whole = record(tiny("causal"), [[1, 2, 3]], gen_length=6)
    page = opened(report(whole, tmp_path / "plot.html", row=0), scheme=scheme)
    red, _, blue = page.evaluate(
        """() => { const { pathDrawn: c, recorded, pattern } = dlmLens.panes[0]; const key = recorded.keys - 1;
        if (recorded.bin(pattern, 0, key)) throw new Error("it has a score");
        return [...c.getContext("2d").getImageData(0, key, 1, 1).data].slice(0, 3); }"""
    )
    assert blue - red > 40
    assert "Bluish: no score" in page.text(".headpart .note")
