"""Rewritten tokens in the report, in the terminal and in the emerging text, also where their text is hostile."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.display import RICH_STYLES
from dlm_lens.testing import tiny
from dlm_lens.viz.reporting.data import Subject, content_of
from tests.viz.test_hostile_tokens import Decodes, inert
from tests.viz.test_report import unpacked

RUN: dict[str, Any] = {"gen_length": 10, "block_length": 4, "threshold": 0.3, "editing_threshold": 0.1}
NEW, REVISED = RICH_STYLES["new"], RICH_STYLES["revised"]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]


@pytest.fixture(scope="module")
def recording() -> dl.Recording:
    model = tiny("llada2", sampler="llada2_editing")
    found = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], max_post_steps=3, **RUN)
    assert found.run.revised.any()
    return found


def test_the_report_holds_what_was_revised(recording: dl.Recording) -> None:
    run = recording.run
    for row in range(2):
        found = content_of(Subject.of(recording, row))
        kept = run.attention_mask[row]
        assert ("revised" in found) == bool(run.revised[:, row].any())
        if "revised" in found:
            assert unpacked(found["revised"]).tolist() == run.revised[:, row, kept].int().tolist()
        assert unpacked(found["written"]).tolist() == run.unmasked[:, row, kept].int().tolist()
    model = tiny("llada2")
    plain = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], gen_length=6, block_length=4)
    assert "revised" not in content_of(Subject.of(plain, 0))


def test_the_terminal_shows_rewritten_tokens(recording: dl.Recording) -> None:
    run = recording.run
    for row in range(2):
        lines = list(dl.viz.emerging_lines(run, row=row))
        for step, line in enumerate(lines):
            styles = {str(span.style) for span in line.spans}
            answer = slice(run.prompt_length, None)
            ends = torch.tensor(run.eos_token_ids)
            written = run.unmasked[step, row, answer] | run.revised[step, row, answer]
            plain = not bool(torch.isin(run.canvases[step + 1, row, answer], ends)[written].any())
            if plain:  # a tail of equal tokens is one, in the first of their styles
                assert (REVISED in styles) == bool(run.revised[step, row, answer].any()) or "×" in line.plain
                assert (NEW in styles) == bool(run.unmasked[step, row, answer].any()) or "×" in line.plain


def test_the_emerging_text_marks_rewritten_tokens(recording: dl.Recording) -> None:
    run = recording.run
    steps = sorted({int(step) for step in run.revised[:, 0].any(-1).nonzero()} | {0})
    view = dl.viz.emerging_text(run, row=0, steps=steps)
    before, last, marked = run.masked[0, 0], 0, 0
    for piece, step in zip(view.pieces, steps, strict=True):
        now = run.masked[step + 1, 0]
        again = ~before & ~now & run.revised[last : step + 1, 0].any(0)
        values = torch.tensor(piece.props["values"])
        assert values.equal((before & ~now).float() - again.float())
        assert [token.startswith("↻") for token in piece.props["tokens"]] == again.tolist()
        before, last, marked = now, step + 1, marked + int(again.sum())
    assert marked
    assert any("rewritten" in sentence for sentence in view.sentences)


def test_rewritten_tokens_are_escaped(recording: dl.Recording) -> None:
    run = replace(recording.run, tokenizer=Decodes())
    texts = [token for piece in dl.viz.emerging_text(run).pieces for token in piece.props["tokens"]]
    assert any(text.startswith("↻") for text in texts)
    assert all(map(inert, texts))
    assert all(inert(line.plain) for line in dl.viz.emerging_lines(run))
