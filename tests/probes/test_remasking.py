"""Masking again in mid-run, against runs that are edited by hand, and with a planted spread."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.probes import RemaskSensitivity, remask
from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny
from tests.probes.test_decisions import run_of
from tests.recording.reference import PROMPTS

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 5, "gen_length": 10}),
    "semi-autoregressive": ("llada", {"steps": 6, "gen_length": 12, "block_length": 6}),
    "shift": ("dream", {"steps": 5, "gen_length": 8, "remasking": "entropy", "temperature": 0}),
    "blocks": ("sdar", {"gen_length": 8, "remasking": "sequential", "temperature": 0, "stop_tokens": ()}),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_changed_run_is_the_one_that_is_edited_by_hand(name: str) -> None:
    family, settings = RUNS[name]
    model = tiny(family)
    mask = model.config.mask_token_id
    found = remask(model, PROMPTS, share=0.4, seed=5, **settings)
    assert len(found.steps) >= 3
    for index, step in enumerate(found.steps):
        where = found.remasked[index]
        decided = found.run.masked[0] & ~found.run.masked[step]
        assert not bool((where & ~decided).any())

        def edit(now: int, canvas: Tensor, step: int = step, where: Tensor = where) -> Tensor:
            if now != step:
                return canvas
            # The run is the plain one until then.
            assert torch.equal(canvas, found.run.canvases[step])
            changed = canvas.clone()
            for row, place in where.nonzero().tolist():
                changed[row, place] = mask
            return changed

        wanted = denoise(model, PROMPTS, seed=9, on_canvas=edit, **settings)
        assert torch.equal(found.tokens[index], wanted.tokens)
        assert not bool(wanted.masked[-1].any())
        for row in range(len(where)):
            answer = found.run.masked[0, row].nonzero().flatten().tolist()
            kinds: dict[bool, list[bool]] = {True: [], False: []}
            for place in answer:
                kinds[bool(where[row, place])].append(
                    bool(wanted.tokens[row, place] != found.run.tokens[row, place])
                )
            shares = [sum(kinds[one]) / len(kinds[one]) if kinds[one] else math.nan for one in (True, False)]
            got = [float(found.direct[index, row]), float(found.collateral[index, row])]
            assert got == pytest.approx(shares, nan_ok=True)
    assert bool(found.changed.any())


def test_the_share_of_what_is_decided() -> None:
    model = tiny("llada")
    found = remask(model, PROMPTS, steps=5, gen_length=10, share=0.5, at=[1, -1])
    assert found.steps == (1, 4)
    # Two and eight of ten positions are decided on these canvases.
    assert found.remasked.sum(-1).tolist() == [[1, 1], [4, 4]]
    again = remask(model, PROMPTS, steps=5, gen_length=10, share=0.5, at=[1, -1])
    assert torch.equal(again.remasked, found.remasked)
    other = remask(model, PROMPTS, steps=5, gen_length=10, share=0.5, at=[1, -1], seed=1)
    assert not torch.equal(other.remasked, found.remasked)


def test_shares_that_are_known() -> None:
    run = run_of([0, 1, 2, 3])
    remasked = torch.tensor([[[True, True, False, False]]])
    tokens = torch.tensor([[[0, 9, 9, 3]]])  # of 0, 1, 2, 3: one of two changed directly, one of two beside
    found = RemaskSensitivity(run, (2,), remasked, tokens)
    assert found.direct.tolist() == [[0.5]]
    assert found.collateral.tolist() == [[0.5]]
    line = found.table().iloc[0]
    assert (line["step"], line["remasked"], line["direct"], line["collateral"]) == (2, 2, 0.5, 0.5)
    assert math.isnan(line["direct_low"])


def test_a_change_that_nothing_depends_on_stays_where_it_is() -> None:
    # Without attention between positions the prediction of a mask is always the same.
    model = tiny("llada")
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "v_proj" in name:
                value.zero_()
    found = remask(model, PROMPTS, steps=5, gen_length=10, share=0.5)
    assert not bool(found.changed.any())


def test_what_cannot_be_asked_is_refused() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="the result depends on the seed"):
        remask(model, PROMPTS, steps=3, gen_length=6, temperature=1.0)
    with pytest.raises(ValueError, match="nothing is decided on the canvas of step 0"):
        remask(model, PROMPTS, steps=3, gen_length=6, at=[0])
    with pytest.raises(ValueError, match="on the canvas of any step, with steps=1; give more steps"):
        remask(model, PROMPTS, steps=1, gen_length=4)
    with pytest.raises(ValueError, match="has no mask token"):
        remask(tiny("causal"), PROMPTS, gen_length=3)
    with pytest.raises(ValueError, match=r"share is 0; it must be a share, above 0 and at most 1"):
        remask(model, PROMPTS, share=0)
    found = remask(model, PROMPTS, steps=3, gen_length=6)
    for given, told in itertools.product([("far", 1)], ["name is 'far'"]):
        with pytest.raises(ValueError, match=told):
            found.mean(*given)
    with pytest.raises(ValueError, match="nothing was masked at step 7; there are 1, 2"):
        found.mean("direct", 7)
