"""What a corrupted run, or a corrupted prompt with masks, puts in: against passes over its canvases by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.probes import LogitDifference, LogProbability, activation_patching, edge_attribution, token_effects
from dlm_lens.probes.attribution.targets import Decisions
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.testing import tiny


def logs_at(model: Any, run: DenoisingRun, step: int) -> Tensor:
    """Log-probabilities of a plain forward pass over a step's canvas [row, position, token], without [MASK]."""
    with torch.no_grad():
        logits = model(run.canvases[step]).logits.double()
    logits[..., model.config.mask_token_id] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_of_two_runs_the_positions_count_that_are_open_in_both(direction: Any) -> None:
    model = tiny("llada").double()
    clean = dl.denoise(model, ["w1 w2 w3 w4"], steps=4, gen_length=8)
    other = dl.denoise(model, ["w9 w20 w3 w31"], steps=4, gen_length=8)
    found = activation_patching(model, clean, other, target=LogProbability(), direction=direction)
    base, source = (clean, other) if direction == "noising" else (other, clean)
    left_out, steps = 0, []
    for step in range(4):
        decided = clean.unmasked[step, 0].nonzero().flatten().tolist()
        places = [place for place in decided if bool(other.masked[step, 0, place])]
        left_out += len(decided) - len(places)
        if not places:
            continue
        steps.append(step)
        for run, got in ((base, found.base), (source, found.source)):
            wanted = sum(float(logs_at(model, run, step)[0, place, clean.tokens[0, place]]) for place in places)
            assert float(got[len(steps) - 1, 0]) == pytest.approx(wanted, abs=1e-5)  # results are float32
    assert found.steps == tuple(steps)
    assert left_out
    assert "of those that are open in both runs" in found.contract.output
    lacking = next(step for step in range(4) if step not in steps)
    with pytest.raises(ValueError, match=f"step {lacking} has nothing to explain; these steps have: "):
        activation_patching(model, clean, other, steps=[lacking])
    assert "both" not in activation_patching(model, clean, clean, steps=[0], layers=[0]).contract.output


def test_a_run_whose_steps_decide_nothing_has_nothing_to_explain() -> None:
    model = tiny("llada")
    rec = dl.record(model, [[1, 2, 3]], steps=5, gen_length=2)
    idle = rec.select(step=[3, 4]).run
    assert not idle.unmasked.any()
    for steps in (None, [1]):
        with pytest.raises(ValueError, match="activation_patching: no step has anything to explain; give "):
            activation_patching(model, idle, [[1, 9, 3]], steps=steps)


def test_a_corrupted_prompt_leaves_what_the_run_filled_in() -> None:
    model = tiny("llada").double()
    mask = model.config.mask_token_id
    prompt = [1, 2, mask, 4, mask, 6]
    run = dl.denoise(model, [prompt], steps=4, gen_length=4)
    same = activation_patching(model, run, [prompt], "resid", layers=[0])
    assert torch.equal(same.source, same.base)
    assert float(same.effects.abs().max()) < 1e-12
    other = [1, 9, mask, 4, mask, 6]
    found = activation_patching(model, run, [other], "resid", layers=[0], target=LogProbability())
    canvases = run.canvases.clone()
    canvases[:, 0, 1] = 9
    for index, step in enumerate(found.steps):
        with torch.no_grad():
            logits = model(canvases[step]).logits.double()[0]
        logits[:, mask] = -torch.inf
        places = run.unmasked[step, 0].nonzero().flatten()
        wanted = logits.log_softmax(-1)[places, run.tokens[0, places]].sum()
        torch.testing.assert_close(found.source[index, 0].double(), wanted, rtol=1e-6, atol=1e-6)
    # Edges of a prompt that changes nothing have no effect.
    assert float(edge_attribution(model, run, [prompt]).scores.abs().max()) < 1e-12
    with pytest.raises(ValueError, match="has token 3 at canvas position 4 of row 0, which the run fills in"):
        activation_patching(model, run, [[1, 2, mask, 4, 3, 6]])


def scores_at(model: Any, run: DenoisingRun, step: int, decided: Tensor) -> Tensor:
    """The summed logits of `decided` where a step decides, minus those of token 0 [row]; of a pass of its own."""
    stored = StoredRun(model, run)
    with torch.no_grad():
        logits = stored.logits(stored.states(step)).double()
    found = torch.zeros(len(run.tokens), dtype=torch.float64)
    for entry, (row, place) in enumerate(stored.predicted(step).nonzero().tolist()):
        if run.unmasked[step, row, place]:
            found[row] += logits[entry, decided[row, place]] - logits[entry, 0]
    return found


@pytest.mark.parametrize("family", ["duo", "uniform_qwen"])
def test_of_a_run_that_revises_the_tokens_count_that_each_step_decides(family: str) -> None:
    model = tiny(family).double()
    run = dl.denoise(model, [[1, 2, 3, 4, 5], [8, 9, 10]], steps=6, gen_length=8)
    seen: dict[int, Decisions] = {}

    def spy(decisions: Decisions) -> Tensor:
        seen.setdefault(decisions.step, decisions)
        return decisions.logits[:, 0]

    activation_patching(model, run, "zero", "resid", target=spy, layers=[0])
    revised = False
    for step, given in seen.items():
        where = given.row % len(run.tokens), given.position
        assert torch.equal(given.token, run.canvases[step + 1][where])
        revised |= not torch.equal(given.token, run.tokens[where])
    assert revised
    at = next(step for step in seen if bool((run.canvases[step + 1] != run.tokens)[run.unmasked[step]].any()))
    later = [step for step in seen if step > at]
    found = token_effects(model, run, at, later, target=LogitDifference(0), candidates=2)
    assert torch.equal(found.effects[:, 0], torch.zeros(len(found.row), dtype=torch.float64))
    after = run.canvases[1:]
    plain = {step: scores_at(model, run, step, after[step]) for step in later}
    for entry, (row, place) in enumerate(zip(found.row.tolist(), found.position.tolist(), strict=True)):
        own = int(run.canvases[at + 1, row, place])
        assert int(found.tokens[entry, 0]) == own
        for candidate in (1, 2):
            canvases = run.canvases.clone()
            for canvas in canvases[at + 1 :]:
                if int(canvas[row, place]) != own:
                    break
                canvas[row, place] = found.tokens[entry, candidate]
            changed = replace(run, canvases=canvases)
            wanted = sum(float((scores_at(model, changed, step, after[step]) - plain[step])[row]) for step in later)
            assert float(found.effects[entry, candidate]) == pytest.approx(wanted, abs=1e-4)  # float32 results


@pytest.mark.parametrize("family", ["uniform_qwen", "open_dcoder"])
def test_a_part_of_a_run_that_revises_explains_the_tokens_of_the_whole_run(family: str) -> None:
    model, reducers = tiny(family).double(), [dl.ReceivedAttention(min_viewers=1)]
    rec = dl.record(model, [[1, 2, 3, 4, 5], [8, 9, 10]], reducers, steps=6, gen_length=8, seed=[1, 2])
    other = 0
    for steps in ([1, 3], [2, 3], [0, 2, 4]):
        part = rec.select(step=steps).run
        whole, found = (
            activation_patching(model, rec.run, "zero", steps=steps),
            activation_patching(model, part, "zero"),
        )
        torch.testing.assert_close(found.base, whole.base)
        torch.testing.assert_close(found.effects, whole.effects)
        other += int((part.canvases[1:] != rec.run.canvases[1:][steps])[part.unmasked].sum())
    assert other  # the part's next canvases hold other tokens


@pytest.mark.parametrize(
    "family", ["llada", "dream", "open_dcoder", "duo", "uniform_qwen", "sedd", "sdlm", "i_dlm", "causal"]
)
def test_what_a_step_decides_is_what_it_proposed(family: str) -> None:
    steps = {} if family in ("sdlm", "i_dlm", "causal") else {"steps": 6}
    run = dl.denoise(tiny(family), [[1, 2, 3, 4, 5], [8, 9, 10]], gen_length=8, seed=[1, 2], **steps)
    assert torch.equal(run.proposals[run.unmasked], run.canvases[1:][run.unmasked])
