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
            if not bool(where[row].any()):  # a row that is over, whose others did not change by it
                shares = [math.nan, math.nan]
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


ENDING: dict[str, dict[str, Any]] = {
    "mmada": {"steps": 12, "gen_length": 12, "block_length": 4, "eot_token": 3},
    "sdar": {"gen_length": 16, "block_length": 4, "remasking": "sequential", "temperature": 0.0},
}


@pytest.mark.parametrize("family", ENDING)
def test_a_row_that_has_ended_is_not_masked_again_and_does_not_count(family: str) -> None:
    model, prompts, settings = tiny(family), ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1"], dict(ENDING[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    first = denoise(model, prompts, **settings)
    place = first.prompt_length + 3  # the last one of the first block
    end = int(first.tokens[0, place])
    if "eot_token" in settings:
        settings["eot_token"] = end
    else:
        model.config.eos_token_id = model.generation_config.eos_token_id = end
    found = remask(model, prompts, **settings)
    ends, steps = int(found.run.row_steps[0]), torch.tensor(found.steps)
    assert found.run.row_steps.tolist() == [ends, found.run.steps]
    assert ends < found.run.steps
    late = steps >= ends
    assert int(late.sum()) > 2
    assert not bool(found.remasked[late, 0].any())
    # Alone, the row is masked again at the steps that it runs.
    alone = remask(model, prompts[:1], **settings)
    masked_again = found.remasked[:, 0].any(-1)
    assert list(alone.steps) == steps[masked_again].tolist()
    for place, step in enumerate(found.steps):
        for name in ("direct", "collateral"):
            values = getattr(found, name)[place]
            counted = found.remasked[place].any(-1)
            assert torch.equal(values.isfinite(), counted)
            assert found.mean(name, step).value == pytest.approx(float(values[counted].mean()))


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


def test_masks_that_the_plain_run_leaves_do_not_count() -> None:
    found = remask(tiny("sdlm"), [[3, 4, 5, 6]], gen_length=12)
    left = found.run.open[-1, 0]
    assert int(left.sum()) > 0  # the block after the last token
    answer = found.run.open[0, 0] & ~left
    for index in range(len(found.steps)):
        others = (answer & ~found.remasked[index, 0]).nonzero().flatten().tolist()
        changed = [int(found.tokens[index, 0, place]) != int(found.run.tokens[0, place]) for place in others]
        assert float(found.collateral[index, 0]) == pytest.approx(sum(changed) / len(changed))
    assert bool((found.collateral[:, 0] > 0).any())


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
    with pytest.raises(ValueError, match="the sampler of DreamOnModel moves tokens"):
        remask(tiny("dreamon"), PROMPTS, gen_length=6, temperature=0.0)
    with pytest.raises(ValueError, match="the sampler of LLaDA2ForMaskedLM moves tokens"):
        remask(tiny("llada2", sampler="llada2_levenshtein"), PROMPTS, gen_length=6)
    with pytest.raises(ValueError, match=r"share is 0; it must be a share, above 0 and at most 1"):
        remask(model, PROMPTS, share=0)
    found = remask(model, PROMPTS, steps=3, gen_length=6)
    for given, told in itertools.product([("far", 1)], ["name is 'far'"]):
        with pytest.raises(ValueError, match=told):
            found.mean(*given)
    with pytest.raises(ValueError, match="nothing was masked at step 7; there are 1, 2"):
        found.mean("direct", 7)


def test_changed_runs_that_end_with_other_blocks_are_compared_at_the_plain_run_s_positions() -> None:
    ends = set()
    for seed, share in ((5, 0.15), (7, 1.0)):
        model = tiny("a2d_qwen3", seed=seed, sampler="dllm_blocks", eos_token_id=5)
        with torch.no_grad():
            model.lm_head.weight[5] *= 3
        mask = model.config.mask_token_id
        settings = {"gen_length": 10, "block_length": 2, "temperature": 0.0}
        found = remask(model, [[20, 21, 22, 23]], share=share, **settings)
        plain = found.run.tokens[0].tolist()
        for index, step in enumerate(found.steps):
            places = found.remasked[index, 0].nonzero().flatten().tolist()

            def edit(
                now: int, canvas: Tensor, step: int = step, places: list[int] = places, mask: int = mask
            ) -> Tensor:
                changed = canvas.clone()
                if now == step:
                    changed[0, places] = mask
                return changed

            wanted = denoise(model, [[20, 21, 22, 23]], on_canvas=edit, **settings).tokens[0].tolist()
            ends.add((len(wanted) > len(plain)) - (len(wanted) < len(plain)))
            pairs = itertools.zip_longest(plain, wanted[: len(plain)])
            assert found.changed[index, 0].tolist() == [one != other for one, other in pairs]
    assert ends == {-1, 0, 1}  # longer, equal and shorter ones
