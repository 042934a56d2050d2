"""Clocks of a part of a run: the time, the step and the answer of the whole run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes.clock.states import kinds_of, labels_of, quantities_of
from dlm_lens.recording import Recording
from dlm_lens.recording.concatenation import joined
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 14, 3, 20], [9, 16, 4, 20]]
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 6, "gen_length": 8}),
    "revises": ("open_dcoder", {"steps": 6, "gen_length": 8}),
    "rows that end": ("sdar", {"block_length": 4, "gen_length": 8, "threshold": 0.02}),
    "rows of text": ("toy-ar", {"gen_length": 16}),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_steps_of_a_part_have_the_time_and_classes_of_the_whole_run(name: str, tmp_path: Path) -> None:
    family, settings = PARTS[name]
    prompts: Any = PROMPTS
    if family == "toy-ar":
        prompts = ["tom has 5 apples . tom buys 4 more . how many apples ? :", "how many ? :"]
    model = dl.load(family) if family == "toy-ar" else tiny(family)
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    rec = dl.record(model, prompts, reducers, seed=[1, 2], **settings)
    run = rec.run
    if name == "rows of text":
        assert len(set(run.row_steps.tolist())) == 2
    for steps in ([1, 3], [2, 3], [1, 2, 4][: run.steps - 2]):
        selected = rec.select(step=steps)
        stored = Recording.load(selected.save(tmp_path / f"{steps}"))
        for part in (selected, stored, joined([selected.select(batch=[row]) for row in (0, 1)])):
            torch.testing.assert_close(quantities_of(part.run), quantities_of(run)[:, steps])
            for target in ("time", "progress"):
                found, whole = labels_of(part.run, target), labels_of(run, target)[steps]
                torch.testing.assert_close(found, whole, equal_nan=True)
            for place, step in enumerate(steps):
                assert torch.equal(kinds_of(part.run, place), kinds_of(run, step))
            assert part.run.steps_in_all.tolist() == run.row_steps.tolist()
    place = replace(selected.run.part, rows_ran=None)
    assert replace(selected.run, part=place).steps_in_all.tolist() == [run.planned] * 2
