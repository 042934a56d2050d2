"""The report in a browser: it moves, it shows the recording's numbers, and it finds the sinks of find_sinks."""

from itertools import pairwise

import pytest

import dlm_lens as dl
from dlm_lens.printable import counted
from dlm_lens.sinks import AttentionShare, LowKeyNorm, MeanReceived, SoftSigmoid, received_of
from dlm_lens.testing import tiny
from tests.browser.report_sinks import PROMPTS, STEPS, of_page, of_python
from tests.sampling.test_dreamon import GREEDY, MASK, resizing
from tests.sampling.test_dreamon import PROMPTS as DREAMON
from tests.sampling.test_moved_tokens import by_hand

pytestmark = pytest.mark.browser


def until(page, condition, seconds=20):
    """Wait for a condition; playwright's own way of waiting evaluates text, which the page's policy forbids."""
    for _ in range(seconds * 20):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{condition} did not come true in {seconds} s")


RULES = [*map(dl.AboveMean, (0.0, 0.1, 1.0, 2.0, 2.7182818, 3.0, 4.5, 8.0)), *map(dl.AboveStd, (0.3, 2.0, 3.3))]
RULES += [dl.TopK(1), dl.TopK(5), SoftSigmoid(), SoftSigmoid(2.0)]
# Those are computed in the page; these are stored with their default settings in every file.
RULES += [AttentionShare(), MeanReceived()]


@pytest.mark.long
@pytest.mark.parametrize("name", ["toy", "toy-sink", "toy-ar"])
def test_the_page_finds_what_find_sinks_finds(recordings, files, opened, name):
    page = opened(files[name])
    total = 0
    for level in ("head", "layer", "model"):
        for rule in RULES:
            expected = of_python(recordings[name], rule, level)
            # Scores and thresholds too, to the last bit.
            assert of_page(page, rule, level) == expected, (rule, level)
            total += len(expected)
    assert total > 1000


@pytest.mark.long
def test_stored_rules_are_chosen_in_the_page_and_say_what_they_are(opened, tmp_path):
    reducers = [dl.ReceivedAttention(), dl.KeyNorm()]
    recording = dl.record(dl.load("toy"), PROMPTS, reducers, steps=STEPS, gen_length=16)
    rule = LowKeyNorm(0.9)
    page = opened(dl.viz.report(recording, tmp_path / "low.html", detector=rule, row=1))
    assert page.evaluate("document.getElementById('rule').value") == repr(rule)
    options = page.evaluate("[...document.getElementById('rule').options].map((one) => one.value)")
    assert options[:4] == ["above-mean", "above-std", "soft-sigmoid", "top-k"]
    assert set(options[4:]) == {repr(rule), "AttentionShare(threshold=0.3)", "MeanReceived(threshold=0.3)"}
    expected = of_python(recording, rule, "head")
    assert of_page(page, rule, "head") == expected
    assert len(expected) > 20
    said = page.text("#limit")
    assert "LowKeyNorm(below=0.9): norm of the key < below times the median norm" in said
    assert "the page cannot change the setting of this rule" in said
    assert "on the scale of the rule (key norm)" in said
    assert not page.is_visible("#value")
    page.select_option("#level", "layer")
    assert "It has sinks at the level head only." in page.text("#limit")
    assert page.text(".count").startswith("0 sinks")
    page.select_option("#rule", "above-mean")
    assert page.is_visible("#value")
    assert "what find_sinks finds" in page.text("#limit")


@pytest.mark.long
def test_a_cut_file_is_exact_from_its_limit_on_and_says_so(recordings, opened, tmp_path, monkeypatch):
    monkeypatch.setattr("dlm_lens.viz.reporting.page.BUDGET", 12_000)
    page = opened(dl.viz.report(recordings["toy"], tmp_path / "cut.html", row=1))
    exact = page.evaluate("dlmLens.panes[0].recorded.about.exact")
    assert not exact["all"]
    assert exact["scores"] < exact["of"]
    rules = {"above-mean": dl.AboveMean, "above-std": dl.AboveStd}
    for name, rule in rules.items():
        limit = exact["limits"][name]
        missing = 0
        for level in ("head", "layer", "model"):
            assert of_page(page, rule(limit), level) == of_python(recordings["toy"], rule(limit), level)
            found = of_page(page, rule(limit - 0.01), level)
            wanted = of_python(recordings["toy"], rule(limit - 0.01), level)
            assert found.items() <= wanted.items()
            missing += len(wanted) - len(found)
        assert missing > 0  # the limit is no further up than it must be
    most = int(exact["limits"]["top-k"])
    assert of_page(page, dl.TopK(most), "head") == of_python(recordings["toy"], dl.TopK(most), "head")
    page.set("#value", exact["limits"]["above-mean"])
    assert "what find_sinks finds" in page.text("#limit")
    page.set("#value", exact["limits"]["above-mean"] - 0.01)
    assert "lower bounds" in page.text("#limit")
    assert "or more sinks" in page.text(".count")


@pytest.mark.long
def test_numbers_shown_are_those_of_the_recording(recordings, files, opened):
    page = opened(files["toy"])
    values = received_of(recordings["toy"]).values[:, 1]
    padding = int(recordings["toy"].run.padding[1])
    for step, layer, head in [(0, 0, 0), (5, 3, 1), (STEPS - 1, 2, 2)]:
        page.set("#step", step)
        page.evaluate("([l, h]) => dlmLens.panes[0].choose(l, h)", [layer, head])
        lines = page.eval_on_selector_all(
            "table.strongest tbody tr",
            "rows => rows.map(r => [r.cells[0].textContent, r.cells[3].textContent, r.cells[3].dataset.exact])",
        )
        scores = values[step, layer, head]
        expected = scores.nan_to_num(nan=-1).argsort(descending=True, stable=True)[: len(lines)].tolist()
        # The page counts from the prompt's first token, the values have the padding of the longer prompt.
        canvas = [int(position) + padding for position, _, _ in lines]
        assert canvas == expected
        for key, (_, shown, exact) in zip(canvas, lines, strict=True):
            assert float(exact) == scores[key].item()
            assert abs(float(shown) - float(exact)) <= 0.000501
    assert len(lines) == 16


@pytest.mark.long
def test_colours_and_bins_hold_the_scores(recordings, files, opened):
    page = opened(files["toy"])
    bins = page.evaluate(
        """() => { const r = dlmLens.panes[0].recorded; const p = r.pattern("head", 1, 2);
        return [...Array(r.steps).keys()].map(t => r.about.positions.map((_, k) => r.bin(p, t, k))); }"""
    )
    keys = page.evaluate("dlmLens.panes[0].recorded.about.positions")
    scores = received_of(recordings["toy"]).values[:, 1, 1, 2, int(recordings["toy"].run.padding[1]) :]
    for step, line in enumerate(bins):
        for key, (low, high) in zip(keys, line, strict=True):
            # Borders are float64 in the page.
            assert low * (1 - 1e-6) <= scores[step, key].item() <= high * (1 + 1e-6)
            assert high <= max(2 * low, 0.25, 1.5 * low)
    ground = "e => getComputedStyle(e).backgroundColor"
    grounds = {page.eval_on_selector(f".cell[data-key='{key}']", ground) for key in range(len(keys))}
    assert len(grounds) > 5


@pytest.mark.long
def test_the_slider_moves_and_the_canvas_changes(recordings, files, opened):
    page = opened(files["toy"])
    run = recordings["toy"].run
    content = run.attention_mask[1].nonzero().flatten()
    for step in (0, 3, STEPS - 1):
        page.set("#step", step)
        assert f"step {step} of 0 to {STEPS - 1}" in page.text("#where")
        masked = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.classList.contains('masked'))")
        assert masked == run.masked[step, 1, content].tolist()
        written = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.classList.contains('written'))")
        assert written == run.unmasked[step, 1, content].tolist()
        shown = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.textContent)")
        for text, token, hidden in zip(shown, run.canvases[step, 1, content].tolist(), masked, strict=True):
            word = recordings["toy"].words[token].strip()
            assert text.strip() == ("" if hidden else word if len(word) <= 14 else f"{word[:13]}…")


@pytest.mark.long
def test_paths_change_with_the_head_and_the_line_with_the_step(files, opened):
    page = opened(files["toy"])
    picture = "e => e.toDataURL()"
    first = {name: page.eval_on_selector(f"canvas.{name}", picture) for name in ("grid", "path")}
    page.set("#step", 5)
    second = {name: page.eval_on_selector(f"canvas.{name}", picture) for name in ("grid", "path")}
    assert first["grid"] != second["grid"]
    assert first["path"] != second["path"]
    page.set("#value", 1000)
    assert page.text(".count").startswith("0 sinks")
    assert "no sink" in page.text(".chosen")
    assert page.eval_on_selector("canvas.grid", picture) != second["grid"]


@pytest.mark.long
def test_play_goes_to_the_end_and_stops(files, opened):
    page = opened(files["toy"])
    page.set("#step", STEPS - 3)
    page.click("#play")
    assert page.text("#play") == "Pause"
    until(page, f"dlmLens.state.step === {STEPS - 1} && dlmLens.state.timer === null")
    assert page.text("#play") == "Play"
    page.click("#play")  # again, from the start
    until(page, "dlmLens.state.step === 1")
    page.click("#play")
    assert page.evaluate("dlmLens.state.timer") is None


@pytest.mark.long
def test_keyboard(files, opened):
    page = opened(files["toy"])
    at = "[dlmLens.state.step, dlmLens.state.layer, dlmLens.state.head]"
    page.evaluate("dlmLens.panes[0].choose(1, 1)")
    for key, step in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", STEPS - 1), ("Home", 0)]:
        page.keyboard.press(key)
        assert page.evaluate(at) == [step, 1, 1]
    page.keyboard.press("Space")
    assert page.evaluate("dlmLens.state.timer !== null")
    page.keyboard.press("Space")
    page.focus("canvas.grid")
    step = page.evaluate("dlmLens.state.step")
    for key, place in [
        ("ArrowDown", [2, 1]),
        ("ArrowRight", [2, 2]),
        ("ArrowUp", [1, 2]),
        ("Home", [1, 0]),
        ("ArrowLeft", [1, 0]),
        ("End", [1, 3]),
        ("PageDown", [3, 3]),
        ("ArrowDown", [3, 3]),
    ]:
        page.keyboard.press(key)
        assert page.evaluate(at) == [step, *place]
    assert "layer 3, head 3" in page.get_attribute("canvas.grid", "aria-label")
    assert "layer 3, head 3" in page.text("#said")
    outline = "e => getComputedStyle(e).outlineStyle"
    assert page.eval_on_selector("canvas.grid", outline) != "none"


@pytest.mark.long
def test_every_control_is_reached_with_tab_and_named(files, opened):
    page = opened(files["both"])
    seen, name = set(), "document.activeElement.id || document.activeElement.className"
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(name))
    assert {"theme", "play", "back", "forward", "step", "rule", "value", "fine", "level", "link", "grid"} <= seen
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas")].filter(e =>
        !(e.getAttribute("aria-label") || e.textContent.trim() ||
        [...(e.labels ?? [])].some(l => l.textContent.trim())))
        .map(e => e.outerHTML)"""
    )
    assert unnamed == []


@pytest.mark.long
def test_clicks_in_the_grid_and_the_path(files, opened):
    page = opened(files["toy"])
    box = page.locator("canvas.grid").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 10, box["y"] + box["height"] - 10)
    assert page.evaluate("[dlmLens.state.layer, dlmLens.state.head]") == [3, 3]
    page.mouse.click(box["x"] + 40, box["y"] + 30)
    assert page.evaluate("[dlmLens.state.layer, dlmLens.state.head]") == [0, 0]
    assert "layer 0, head 0" in page.text(".chosen")
    page.locator("canvas.path").scroll_into_view_if_needed()
    box = page.locator("canvas.path").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    assert page.evaluate("dlmLens.state.step") == STEPS - 1


@pytest.mark.long
def test_the_tables_list_the_sinks_of_the_step(recordings, files, opened):
    page = opened(files["toy"])
    page.set("#step", 4)
    for eps in (3.0, 1.5):
        page.set("#value", eps)
        sinks = {p: s for p, s in of_python(recordings["toy"], dl.AboveMean(eps), "head").items() if p[0] == 4}
        keys = len({p[3] for p in sinks})
        found = f"{counted(len(sinks), 'sink')} at {counted(keys, 'position')} in 16 heads"
        assert page.text(".count").startswith(found)
        page.select_option(".listing", "head")
        while page.locator(".more").is_visible():
            page.click(".more")
        lines = page.eval_on_selector_all(
            "table.sinks tbody tr",
            "rows => rows.map(r => [r.cells[0].textContent, r.cells[1].textContent, r.cells[4].dataset.exact])",
        )
        listed = {(where, int(position)): float(score) for where, position, score in lines}
        assert listed == {(f"L{layer} H{head}", position): s[0] for (_, layer, head, position), s in sinks.items()}
        page.select_option(".listing", "key")
        counts = page.eval_on_selector_all(
            "table.sinks tbody tr",
            "rows => rows.map(r => [Number(r.cells[0].textContent), Number(r.cells[3].textContent)])",
        )
        positions = [place[3] for place in sinks]
        assert dict(counts) == {position: positions.count(position) for position in positions}
    page.select_option("#rule", "top-k")
    assert page.text(".count").startswith("16 sinks")
    page.select_option("#level", "model")
    assert page.text(".count").startswith("1 sink at 1 position in 1 pattern")
    page.select_option("#rule", "above-std")
    assert "standard deviations" in page.text("#limit")


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 480])
@pytest.mark.parametrize("name", ["toy-sink", "both"])
def test_nothing_is_wider_than_the_window(files, opened, name, width, scheme):
    page = opened(files[name], width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tops = page.eval_on_selector_all(".pane", "panes => panes.map(p => p.getBoundingClientRect().top)")
    if name == "both":
        assert (tops[0] == tops[1]) == (width == 1280)  # beside each other, or one below the other
    ground = "e => getComputedStyle(e).backgroundColor"
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    before = page.eval_on_selector("body", ground)
    page.click("#theme")
    assert page.eval_on_selector("body", ground) != before


@pytest.mark.long
def test_a_menu_shows_every_prompt_of_a_recording(recordings, tmp_path, opened):
    rec = recordings["toy"]
    page = opened(dl.viz.report(rec, tmp_path / "all.html"))
    options = page.eval_on_selector_all("#prompt option", "all => all.map(one => one.textContent)")
    assert [option.split(":")[0] for option in options] == ["row 0", "row 1"]
    assert page.text("#prompted") == "prompt 1 of 2"
    for row in (1, 0):
        page.page.select_option("#prompt", str(row))
        page.page.wait_for_selector(f"html[data-prompt='{row}']")
        assert page.text("#prompted") == f"prompt {row + 1} of 2"
        assert f"row {row} of 2" in page.text(".about")
        rule = dl.AboveMean(3.0)
        wanted, found = of_python(rec, rule, "head", row=row), of_page(page, rule, "head")
        assert set(found) == set(wanted)
    one = opened(dl.viz.report(rec, tmp_path / "one.html", row=1))
    assert not one.is_visible("#prompts")
    assert "row 1 of 2" in one.text(".about")


@pytest.mark.long
def test_the_grid_marks_the_heads_whose_sinks_move(tmp_path, opened):
    rec = dl.record(dl.load("toy"), MOVING, gen_length=21, block_length=7)
    page = opened(dl.viz.report(rec, tmp_path / "moving.html"))
    kinds = dl.trajectories(rec, dl.AboveMean(3.0)).kinds[0]
    moving = {(layer, head) for layer in range(4) for head in range(4) if kinds[layer, head] == "moving"}
    assert moving == {(2, 3)}
    marked = page.evaluate("""() => {
        const { recorded } = window.dlmLens.panes[0];
        const found = [];
        for (let layer = 0; layer < 4; layer += 1) for (let head = 0; head < 4; head += 1) {
            if (recorded.about.kinds[recorded.pattern("head", layer, head)] === "m") found.push([layer, head]);
        }
        return found;
    }""")
    assert {tuple(place) for place in marked} == moving
    assert "moves over the run (1 of 16 heads; trajectories, AboveMean(eps=3.0))" in page.text(".movers")
    assert "its sink moves over the run" in page.text(".chosen")
    # Drawn where it is said to be: the corner of the cell has the mark's colour, that of its neighbour has not.
    corners = """(places) => {
        const canvas = document.querySelector("canvas.grid");
        const scale = canvas.width / canvas.clientWidth;
        const width = (canvas.clientWidth - 32) / 4, height = (canvas.clientHeight - 20) / 4;
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return places.map(([layer, head]) => {
            const at = [30 + (head + 1) * width - 4, 18 + layer * height + 3];
            const [x, y] = at.map((one) => Math.round(one * scale));
            return [...pixels.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3)];
        });
    }"""
    page.evaluate("() => window.dlmLens.panes[0].choose(0, 0)")
    marked_cell, other = page.evaluate(corners, [[2, 3], [2, 1]])
    assert marked_cell == [0, 80, 208]
    assert other != marked_cell


MOVING = "leo has 26 stones . leo breaks 6 . leo loses 9 . he picks 12 stones . how many stones now ? :"


@pytest.mark.long
def test_the_controls_stay_on_a_phone(files, opened):
    page = opened(files["toy"], width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for down in (0, 400, 1200):
        page.evaluate(f"window.scrollTo(0, {down})")
        for control in ("#play", "#step", "#rule", "#level"):
            box = page.page.locator(control).bounding_box()
            assert 0 <= box["y"] <= 844 / 2, (down, control)
            assert box["x"] >= 0, (down, control)
            assert box["x"] + box["width"] <= 390, (down, control)
    assert page.evaluate("document.getElementById('controls').getBoundingClientRect().height") <= 844 / 2


@pytest.mark.long
def test_rewritten_tokens_are_marked(tmp_path, opened):
    model = tiny("llada2", sampler="llada2_editing")
    settings = {"gen_length": 10, "block_length": 4, "threshold": 0.3, "editing_threshold": 0.2}
    recording = dl.record(model, [[1, 2, 3, 4, 5, 6, 7]], [dl.ReceivedAttention(min_viewers=1)], **settings)
    revised = recording.run.revised[:, 0]
    page = opened(dl.viz.report(recording, tmp_path / "report.html"))
    for step in (0, *revised.any(-1).nonzero().flatten().tolist()[:2]):
        page.set("#step", step)
        marked = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.classList.contains('revised'))")
        assert marked == revised[step].tolist()
    titles = page.eval_on_selector_all(".cell.revised", "cells => cells.map(c => c.title)")
    assert titles
    assert all("rewritten at this step" in title for title in titles)
    assert page.eval_on_selector_all(".revisedkey", "all => all.length") == 1


@pytest.mark.long
def test_a_print_keeps_the_colours_of_the_canvas_and_is_light(files, opened):
    page = opened(files["toy-sink"], scheme="dark")
    for place in (".cell.masked", ".legend .bar", ".legend .maskkey"):  # browsers print no backgrounds by default
        adjusted = page.eval_on_selector(place, "e => getComputedStyle(e).getPropertyValue('print-color-adjust')")
        assert adjusted == "exact", place
    theme, ink = "document.documentElement.dataset.theme", "e => e.style.backgroundColor"
    before = page.eval_on_selector(".cell", ink)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(theme) == "light"
    assert page.eval_on_selector(".cell", ink) != before
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(theme) == "dark"
    assert page.eval_on_selector(".cell", ink) == before


@pytest.mark.long
def test_labels_of_learned_sinks_and_positions_do_not_overlap(tmp_path, opened):
    model = tiny("sink_qwen", num_sinks=3)
    recording = dl.record(model, [[5] * 25], steps=4, gen_length=16)
    page = opened(dl.viz.report(recording, tmp_path / "sinks.html"))
    labels = page.evaluate(
        """() => {
          const found = [], write = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            if (this.canvas.classList.contains("path") && this.textAlign === "right") found.push([String(text), y]);
            return write.call(this, text, x, y);
          };
          dlmLens.page.paint();
          CanvasRenderingContext2D.prototype.fillText = write;
          return found;
        }"""
    )
    assert labels[0][0] == "0"
    assert "sink(0)" in [text for text, _ in labels]
    heights = [height for _, height in labels]
    assert all(after - before >= 11 for before, after in pairwise(heights))  # pixels of the font


@pytest.mark.long
@pytest.mark.parametrize("row", range(3))
def test_a_mask_that_moves_is_followed_to_its_token(opened, tmp_path, row):
    """The page named the token that came to the mask's position, and the step of the move."""
    model = resizing(seed=5)
    recording = dl.record(model, DREAMON, [dl.ReceivedAttention(min_viewers=1)], **GREEDY)
    page = opened(dl.viz.report(recording, tmp_path / "moved.html", row=row))
    history = by_hand(model, DREAMON[row])
    seen = recording.run.seen_content[:, row][:, recording.run.attention_mask[row]]
    for step, text in enumerate(history[:-1]):
        page.set("#step", step)
        titles = page.eval_on_selector_all(".cell", "cells => cells.map(c => c.title)")
        underlined = page.eval_on_selector_all(".cell.written", "cells => cells.map(c => c.title)")
        for place, key in enumerate(seen[step].nonzero().flatten().tolist()):
            became = [one for one in history[-1] if len(one.places) > step and one.places[step] == place]
            if text[place].token != MASK or len(became) != 1:
                continue
            (one,) = became
            # Two masks of which one is deleted: the page names no token of a mask that was split.
            steps = range(step + 1, one.decided + 2)
            twins = [sum(other.places[:at] == one.places[:at] for other in history[at]) for at in steps]
            told = f'masked, decoded at step {one.decided}: "w{one.token}"' in titles[key]
            assert told == (max(twins) == 1), (step, key)
        assert len(underlined) == sum(one.decided == step for one in history[step + 1])
        assert all(f"decoded at step {step}" in title for title in underlined)
