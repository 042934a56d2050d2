"""The explorer in a browser, with a real model: clicks and keys make runs, and the page shows their numbers."""

import json

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_heads, at_layers, mask_positions
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Received, find_sinks, received_of
from dlm_lens.testing import tiny
from dlm_lens.viz.exploring.page_requests import split
from dlm_lens.viz.exploring.sides import Side
from tests.browser.kernel_page import Notebook
from tests.viz.test_hostile_tokens import HOSTILE, Decodes

pytestmark = [pytest.mark.browser, pytest.mark.long]

PROMPT = "tom has 5 apples . tom buys 4 more . how many apples ? :"
SETTINGS = {"steps": 16, "gen_length": 16}
TWIN = "host.dlmLens.page.panes.length === 2"


@pytest.fixture(scope="module")
def model():
    return dl.load("toy")


@pytest.fixture
def notebook(chromium, tmp_path):
    """Show an explorer in a fresh page; what the page complains about, or asks a network for, fails the test."""
    shown = []

    def show(explorer, width=1280, scheme="light"):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        shown.append(Notebook(page, explorer, tmp_path))
        return shown[-1]

    yield show
    for one in shown:
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith(("file:", "blob:", "data:"))] == []
        one.page.close()


def go(shown, step):
    shown.page.eval_on_selector(
        "#step", "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", step
    )


def cells(notebook, pane):
    return notebook.page.evaluate(
        "(i) => host.dlmLens.page.panes[i].cellOf.map((c) => [c.textContent, c.className])", pane
    )


def test_clicks_hide_keys_and_heads_and_the_twin_is_the_hooked_run(model, notebook):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    page = shown.page
    page.click(".cell[data-key='3']")
    page.click("#hide_key")
    shown.until(TWIN)
    hooks = [mask_positions(3)]
    assert explorer.twin.tokens.equal(dl.denoise(model, PROMPT, hooks=hooks, **SETTINGS).tokens)
    assert shown.text("#summary") == explorer._exploration.summary()
    assert page.evaluate("host.dlmLens.page.panes[1].cellOf[3].classList.contains('gone')")
    page.evaluate("host.dlmLens.page.choose(2, 1)")
    page.click("#hide_head")
    shown.until("model.get('_changes').length === 2")
    hooks.append(at_heads(at_layers(ablate("z"), [2]), [1]))
    assert explorer.twin.tokens.equal(dl.denoise(model, PROMPT, hooks=hooks, **SETTINGS).tokens)
    assert [line.split(" hidden")[0] for line in shown.text("#changes").splitlines() if "hidden" in line] == [
        'position 3 ("5")',
        "layer 2, head 1",
    ]
    # The picture is of the last step, where the canvases differ in what the comparison counts at most.
    page.eval_on_selector("#step", "(e) => { e.value = 15; e.dispatchEvent(new Event('input', {bubbles: true})); }")
    shown.until("host.dlmLens.page.panes.every((pane) => pane.step === 15)")
    differing = {key for key, (_, kind) in enumerate(cells(shown, 1)) if "differs" in kind.split()}
    one, two = (run.canvases[15, 0].masked_fill(run.masked[15, 0], -1) for run in (explorer.run, explorer.twin))
    assert differing == set(((one != two) & (one >= 0) & (two >= 0)).nonzero().flatten().tolist())
    page.click("#undo")
    shown.until("model.get('_changes').length === 1")
    page.click("#clear")
    shown.until("host.dlmLens.page.panes.length === 1")
    assert explorer.twin is None
    assert shown.text("#summary") == ""


def test_numbers_on_the_page_are_those_of_the_kernel(model, notebook):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    values = received_of(dl.record(model, PROMPT, **SETTINGS)).values[:, 0]
    explorer.select(step=5, layer=3, head=1, position=18)
    shown.from_python()
    shown.until("host.dlmLens.page.panes[0].step === 5 && host.dlmLens.page.panes[0].pattern === 13")
    lines = shown.page.eval_on_selector_all(
        "table.strongest tbody tr", "rows => rows.map(r => [r.cells[0].textContent, r.cells[3].dataset.exact])"
    )
    scores = values[5, 3, 1]
    order = scores.argsort(descending=True, stable=True)[: len(lines)].tolist()
    assert [(int(place), float(exact)) for place, exact in lines] == [(key, scores[key].item()) for key in order]
    shown.page.click("#lens_on")
    shown.until("host.shadowRoot.querySelectorAll('table.lens tbody tr').length === 4")
    lens = dl.logit_lens(model, explorer.run, [18], steps=[5], controls=False)
    found = shown.page.eval_on_selector_all(".reading", "all => all.map((e) => Number(e.dataset.exact))")
    assert found == lens.top_probabilities[0].flatten().tolist()
    shown.page.click("#pattern_on")
    shown.until("host.dlmLens.page.panes[0].shownPattern")
    drawn = shown.page.evaluate("[...host.dlmLens.page.panes[0].shownPattern.values]")
    assert drawn == explorer.pattern().flatten().tolist()
    # What is selected in the page is selected in Python.
    shown.page.click(".cell[data-key='2']")
    shown.page.click("#forward")
    shown.until("model.get('_selection').step === 6 && model.get('_selection').position === 2")
    assert (explorer.selection.step, explorer.selection.position) == (6, 2)
    assert "[2], steps=[6]" in shown.page.evaluate("host.shadowRoot.getElementById('code').textContent")


def test_python_selects_what_the_page_selected_before(model, notebook):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    for step in (3, 5):
        go(shown, step)
        shown.until(f"model.get('_selection').step === {step}")
    for step in (3, 5, 3):
        explorer.select(step=step)
        shown.from_python()
        shown.until(f"host.dlmLens.page.panes[0].step === {step}")
    shown.page.wait_for_timeout(400)  # after which the page has told what it shows
    assert explorer.selection.step == 3


def test_the_canvas_is_edited_and_errors_are_sentences(model, notebook):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    page = shown.page
    page.eval_on_selector("#step", "(e) => { e.value = 4; e.dispatchEvent(new Event('input', {bubbles: true})); }")
    shown.until("host.dlmLens.page.panes[0].step === 4")
    page.click(".cell[data-key='20']")
    page.fill("#token", "tom tom tom")
    page.click("#plant")
    page.wait_for_selector("#problem:not([hidden])")
    assert "is 3 tokens (tom, tom, tom)" in shown.text("#problem")
    assert explorer.twin is None
    page.fill("#token", "9")
    page.press("#token", "Enter")
    shown.until(TWIN)
    assert explorer.twin.canvases[4, 0, 20] == model.tokenizer("9", add_special_tokens=False)["input_ids"][0]
    assert not page.is_visible("#problem")
    assert "planted" in cells(shown, 1)[20][1]
    page.click("#reopen")
    shown.until("model.get('_changes')[0].text === '[MASK]'")
    assert explorer.twin.masked[4, 0, 20]


def test_everything_is_reached_by_keys(model, notebook):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    page = shown.page
    focused = "host.shadowRoot.activeElement"
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(f"{focused} && ({focused}.id || {focused}.className || {focused}.tagName)"))
        if seen[-1] == "cell":
            break
    assert {"play", "step", "rule", "level", "hide_head", "pattern_on", "lens_on"} <= set(seen)
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{focused}.dataset.key") == "3"
    assert page.evaluate(f"{focused}.getAttribute('aria-selected')") == "true"
    assert "position 3" in page.evaluate(f"{focused}.getAttribute('aria-label')")
    page.keyboard.press("x")
    shown.until(TWIN)
    assert [repr(hook) for hook in explorer.hooks] == ["mask_positions(3)"]
    assert "tokens of the answer changed" in page.evaluate("host.shadowRoot.getElementById('said').textContent")
    page.focus("canvas.grid")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    shown.until("model.get('_changes').length === 2")
    unnamed = page.evaluate(
        """[...host.shadowRoot.querySelectorAll('button, input, select, canvas')]
        .filter((e) => !e.closest('[hidden]') && !e.textContent.trim())
        .filter((e) => !e.labels?.length && !e.getAttribute('aria-label')).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_a_lens_and_a_pattern_that_fail_leave_no_others_under_their_name(model, notebook, monkeypatch):
    explorer = dl.viz.explore(model, PROMPT, **SETTINGS)
    shown = notebook(explorer)
    for name in ("lens", "pattern"):
        shown.page.click(f"#{name}_on")
    shown.page.click(".cell[data-key='3']")
    lines = "host.shadowRoot.querySelectorAll('table.lens tbody tr').length"
    canvas = "host.shadowRoot.querySelector('canvas.pattern')"
    shown.until(f"{lines} === 4 && {canvas}.width > 0 && host.dlmLens.page.panes[0].shownPattern")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for name in ("lens", "pattern"):
        monkeypatch.setattr(explorer._exploration, name, interrupted)
    go(shown, 9)
    sentence = "Interrupted; nothing was changed."
    for part in (".lensnote", ".pair"):
        shown.until(f"host.shadowRoot.querySelector('{part}').textContent === '{sentence}'")
    assert shown.page.evaluate(f"[{lines}, {canvas}.width]") == [0, 0]
    assert shown.page.evaluate(f"{canvas}.getAttribute('aria-label')") == sentence
    shown.page.focus("canvas.pattern")
    shown.page.keyboard.press("ArrowDown")  # there is no entry to read
    assert shown.text(".pair") == sentence
    monkeypatch.undo()
    # The same selection is computed when the page paints again.
    shown.page.evaluate("host.dlmLens.page.paint()")
    shown.until(f"{lines} === 4 && host.dlmLens.page.panes[0].shownPattern")
    drawn = shown.page.evaluate("[...host.dlmLens.page.panes[0].shownPattern.values]")
    assert drawn == explorer.pattern().flatten().tolist()
    assert explorer.selection.step == 9


def test_sinks_over_steps_are_counted_when_all_steps_are_known(model, notebook, monkeypatch):
    explorer = dl.viz.explore(model, PROMPT, steps=48, gen_length=48)
    sinks = find_sinks(explorer.received, dl.AboveMean(3.0)).is_sink[:, 0].any(-1).sum(0)
    shown = notebook(explorer)
    layer, head = divmod(int(sinks.flatten().argmax()), sinks.shape[1])
    other = (layer + 1) % len(sinks)
    summary = "host.shadowRoot.querySelector('.summary').textContent"
    over_steps = Side.over_steps
    fails = []

    def interrupted(self, level, *place):
        fails.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(Side, "over_steps", interrupted)
    shown.page.evaluate(f"host.dlmLens.page.choose({other}, {head})")
    shown.page.evaluate(f"host.dlmLens.page.choose({layer}, {head})")
    shown.until(f"{summary}.startsWith('Waiting for the kernel')")
    shown.page.wait_for_timeout(700)
    assert shown.page.evaluate(summary).startswith("Waiting for the kernel")
    assert (layer, head) in fails
    assert len(fails) < 60  # one request a picture, not one after another
    monkeypatch.setattr(Side, "over_steps", over_steps)
    shown.page.evaluate("host.dlmLens.page.paint()")
    shown.until(f"{summary}.startsWith('A sink at {int(sinks[layer, head])} of 48 steps')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_narrow_and_follows_the_theme(model, notebook, scheme):
    shown = notebook(dl.viz.explore(model, PROMPT, **SETTINGS), width=390, scheme=scheme)
    assert shown.page.evaluate("host.dataset.theme") == scheme
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = shown.page.evaluate(
        """[...host.shadowRoot.querySelectorAll('button, input, select, p, h3')]
        .filter((e) => e.getBoundingClientRect().right > innerWidth && !e.closest('.scroll'))
        .map((e) => e.outerHTML)"""
    )
    assert wide == []
    colours = {"light": ("rgb(250, 250, 250)", "color(srgb 1 1 1)"), "dark": ("rgb(10, 10, 10)", "oklch(0.2 0 0)")}
    other = {"light": "dark", "dark": "light"}[scheme]
    for notation in (0, 1):  # marimo writes the second
        for theme in (other, scheme):
            colour = colours[theme][notation]
            shown.page.evaluate("(colour) => { document.body.style.backgroundColor = colour; }", colour)
            shown.until(f"host.dataset.theme === '{theme}'")


def test_hostile_tokens_are_text(notebook):
    model = tiny("llada")
    model.tokenizer = Decodes()
    explorer = dl.viz.explore(model, [list(range(len(HOSTILE)))], gen_length=8)
    shown = notebook(explorer)
    shown.page.click(".cell[data-key='2']")
    shown.page.click("#hide_key")
    shown.until(TWIN)
    shown.page.click("#lens_on")
    shown.until("host.shadowRoot.querySelectorAll('table.lens tbody tr').length > 1")
    made = "host.shadowRoot.querySelectorAll('script, img, iframe, a, svg, object').length"
    assert shown.page.evaluate(made) == 0
    # Nothing of the canvas turns the direction of the text after it, or is invisible.
    assert all(text.replace("\xa0", "").isprintable() for text, _ in cells(shown, 0))


MOVES = """async (steps) => {
    const { page } = host.dlmLens;
    const slider = host.shadowRoot.getElementById('step');
    const painted = () => new Promise((done) => requestAnimationFrame(() => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = done;
        port2.postMessage(0);
    }));
    const times = [];
    for (const step of steps) {
        const start = performance.now();
        slider.value = step;
        slider.dispatchEvent(new Event('input', { bubbles: true }));
        while (page.panes[0].step !== step) await new Promise((done) => setTimeout(done, 1));
        await painted();
        times.push(performance.now() - start);
        await new Promise((done) => setTimeout(done, 60));
    }
    return times;
}"""


def large(steps=200, layers=32, heads=32, keys=192):
    """Received attention and a run of the size of a model of 8B parameters."""
    draw = torch.Generator().manual_seed(0)
    values = torch.rand(1, 1, layers, heads, keys, generator=draw) ** 8 * 6
    values = values + torch.rand(steps, 1, layers, heads, keys, generator=draw)
    values /= values.mean(-1, keepdim=True)
    tokens = torch.randint(1, 60, (steps + 1, 1, keys), generator=draw)
    at = torch.arange(steps + 1)[:, None, None]
    masked = (torch.arange(keys) >= 64 + at * (keys - 64) // steps) & (torch.arange(keys) >= 64)
    prompt = tokens[0]
    tokens = torch.where(masked, 63, prompt)
    unmasked = masked[:-1] & ~masked[1:]
    run = DenoisingRun(
        canvases=tokens,
        masked=masked,
        proposals=tokens[:-1],
        confidence=torch.zeros(steps, 1, keys),
        unmasked=unmasked,
        attention_mask=torch.ones(1, keys, dtype=torch.bool),
        prompt_length=64,
        spans=((64, keys),) * steps,
        blocks=(0,) * steps,
        settings={"sampler": "llada", "seeds": (0,)},
    )
    ones = torch.ones(steps, 1, 1, 1, keys)
    counted = torch.full((steps, 1), keys)
    return Received(values=values, expected=ones, counted=counted, layers=tuple(range(layers))), run


@pytest.mark.in_turn
def test_it_is_fluid_with_two_hundred_steps_of_a_thousand_heads(notebook):
    """The time of the page's main thread for a move, which other work beside the tests does not change."""
    explorer = dl.viz.explore(tiny("llada"), large())
    shown = notebook(explorer)
    far = shown.page.evaluate(MOVES, [(37 * i) % 200 for i in range(2, 12)])  # the kernel sends them first
    size = sum(map(len, split(explorer._exploration.base.at_step(5))[1]))
    shown.page.evaluate(MOVES, list(range(1, 9)))
    session = shown.page.context.new_cdp_session(shown.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent():
        return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}

    before = spent()
    near = shown.page.evaluate(MOVES, [1 + i % 8 for i in range(40)])
    after = spent()
    names = ("TaskDuration", "ScriptDuration", "RecalcStyleDuration", "LayoutDuration")
    found = {name: round(1000 * (after[name] - before[name]) / len(near), 1) for name in names}
    found |= {"wall_near_ms": round(torch.tensor(near).median().item(), 1)}
    found |= {"wall_far_ms": round(torch.tensor(far).median().item(), 1), "bytes_of_a_step": size}
    print(json.dumps(found))  # noqa: T201
    assert found["TaskDuration"] < 150
    assert 200_000 < size < 1_000_000
