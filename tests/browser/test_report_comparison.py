"""A report of two recordings in a browser."""

import re
from dataclasses import replace

import pytest
import torch

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.browser.report_sinks import STEPS, of_page, of_python

pytestmark = pytest.mark.browser


@pytest.mark.long
def test_a_comparison_is_linked_by_progress_and_by_step(recordings, files, opened):
    page = opened(files["both"])
    assert page.text("#panes .pane:nth-child(1) h2") == "masked"
    assert page.text("#panes .pane:nth-child(2) h2") == "AR"
    progress = [recordings[name].run.progress[:, 1] for name in ("toy", "toy-ar")]
    steps = recordings["toy-ar"].run.steps
    assert steps != STEPS
    for step in range(STEPS):
        page.set("#step", step)
        expected = (progress[1][:steps] - progress[0][step]).abs().argmin().item()
        assert page.evaluate("dlmLens.panes.map(p => p.step)") == [step, expected]
        assert f"at step {expected}," in page.text("#panes .pane:nth-child(2) .when")
    page.select_option("#link", "step")
    for step in range(STEPS):
        page.set("#step", step)
        assert page.evaluate("dlmLens.panes.map(p => p.step)") == [step, min(step, steps - 1)]
    # One rule and one head for both, each with its own numbers.
    rule = dl.AboveMean(1.5)
    for pane, name in enumerate(("toy", "toy-ar")):
        assert of_page(page, rule, "head", pane) == of_python(recordings[name], rule, "head")
    page.locator("canvas.path").nth(1).scroll_into_view_if_needed()
    box = page.locator("canvas.path").nth(1).bounding_box()
    page.mouse.click(box["x"] + 50, box["y"] + 40)
    assert page.evaluate("dlmLens.panes[1].step") == 0


def test_every_prompt_of_a_comparison_has_the_link_of_its_own_steps(opened, tmp_path):
    prompts = ["w1 w2 w3 w4 w5 w6 w7 w8", "w7 w8 w9 w1 w2 w5 w9 w3"]
    masked = dl.record(tiny("llada"), prompts, steps=16, gen_length=16)
    ended = dl.record(tiny("causal", seed=9), prompts, gen_length=16)
    assert ended.run.row_steps.tolist() == [16, 5]
    progress = [recording.run.progress[:, 1] for recording in (masked, ended)]
    by_progress = (progress[1][:5] - progress[0][8]).abs().argmin().item()
    assert by_progress < 4
    page = opened(dl.viz.report(masked, tmp_path / "rows.html", compare=ended))

    def choose(row):
        page.select_option("#prompt", row)
        page.wait_for_selector(f"html[data-prompt='{row}']")
        page.set("#step", 8)
        return [page.input_value("#link"), page.evaluate("dlmLens.panes.map(p => p.step)")]

    assert page.input_value("#link") == "step"
    assert choose("1") == ["progress", [8, by_progress]]
    assert choose("0") == ["step", [8, 8]]
    # What the reader chooses stays.
    page.select_option("#link", "step")
    assert choose("1") == ["step", [8, 4]]
    page.select_option("#link", "progress")
    assert choose("0")[0] == "progress"


@pytest.mark.long
def test_tokens_that_differ_are_marked(recordings, opened, tmp_path):
    base = recordings["toy"].select(batch=[1])
    run = base.run
    content = run.attention_mask[0].nonzero().flatten().tolist()
    place = content[2]
    other_tokens = run.canvases.clone()
    other_tokens[:, 0, place] = other_tokens[0, 0, content[3]]
    assert other_tokens[0, 0, place] != run.canvases[0, 0, place]
    other = replace(base, run=replace(run, canvases=other_tokens))
    page = opened(dl.viz.report(base, tmp_path / "two.html", compare=other))
    marked = page.eval_on_selector_all(
        ".cell", "cells => cells.filter(c => c.classList.contains('differs')).map(c => Number(c.dataset.key))"
    )
    assert marked == [2, 2]
    assert torch.equal(base.received.nan_to_num(), other.received.nan_to_num())


@pytest.mark.long
def test_a_comparison_chooses_layers_and_heads_by_their_numbers(recordings, opened, tmp_path):
    whole = recordings["toy"]
    part = whole.select(layer=[2, 3], head=[1, 3])
    for first, second in ((whole, part), (part, whole)):
        page = opened(dl.viz.report(first, tmp_path / "parts.html", compare=second))

        def shown(page=page):
            found = page.eval_on_selector_all(".headpart .which", "each => each.map(one => one.textContent)")
            return [re.findall(r"layer (\d+), head (\d+)", text)[0] for text in found]

        assert shown()[0] == shown()[1] or first is whole  # the strongest head of a part is in the whole
        for layer, head in ((2, 1), (3, 3), (2, 3)):
            page.page.evaluate(f"dlmLens.page.choose({layer}, {head})")
            assert shown() == [(str(layer), str(head))] * 2
        page.page.evaluate("dlmLens.page.choose(0, 0)")  # the part has the layers 2 and 3, the heads 1 and 3
        nearest, own = ("2", "1"), ("0", "0")
        assert shown() == ([own, nearest] if first is whole else [nearest, own])
