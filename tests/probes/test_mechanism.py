"""The mechanism probe against loops over replays and comparisons, and a planted answer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_random, mask_sinks
from dlm_lens.probes import SinkMechanism, replay, sink_mechanism
from dlm_lens.testing import tiny
from tests.recording.reference import alone

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40], [7, 7, 12, 50]]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "temperature": 0.5, "seed": [3, 4, 5]}
RULE = dl.AboveMean(1.0)


@pytest.mark.long
def test_every_part_is_that_of_replays_and_runs_by_hand() -> None:
    model = tiny("llada")
    found = sink_mechanism(model, PROMPTS, RULE, controls=(1, 2), **RUN)
    rec = dl.record(model, PROMPTS, **RUN)
    sinks = dl.find_sinks(rec, RULE)
    assert found.run.canvases.equal(rec.run.canvases)
    assert found.rule == sinks.rule
    for step in (0, 3):
        for row in range(3):
            keep, masked, kept, *_ = alone(model, rec.run, step, row)
            at = keep.nonzero()[:, 0].tolist()
            for i, position in enumerate(at):
                total = 0.0
                for layer in range(2):
                    for head in range(4):
                        is_sink = sinks.is_sink[step, row, layer, head]
                        total += sum(
                            float(kept[f"pattern{layer}"][0, head, i, j]) for j, k in enumerate(at) if is_sink[k]
                        )
                assert float(found.dependence[step, row, position]) == pytest.approx(total / 8, rel=1e-3, abs=1e-5)
                assert bool(found.predicted[step, row, position]) == bool(masked[i])
    known = mask_sinks(source=sinks)
    by_hand = replay(model, rec.run, [known], attention=False).confidence_change
    torch.testing.assert_close(found.confidence, by_hand, equal_nan=True)
    controls = [replay(model, rec.run, [mask_random(like=known, seed=s)], attention=False) for s in (1, 2)]
    mean = (controls[0].confidence_change + controls[1].confidence_change) / 2
    torch.testing.assert_close(found.confidence_control, mean, equal_nan=True)
    pair = dl.compare(model, PROMPTS, [mask_sinks(RULE)], **RUN)
    assert torch.equal(found.later.nan_to_num(), pair.step_change.nan_to_num())
    assert torch.equal(found.tokens_changed[0], pair.tokens_changed.float())
    others = [dl.compare(model, PROMPTS, [mask_random(like=mask_sinks(RULE), seed=s)], **RUN) for s in (1, 2)]
    mean = torch.stack([other.step_change for other in others]).mean(0)
    torch.testing.assert_close(found.later_control, mean, equal_nan=True)


def planted() -> SinkMechanism:
    """Confidence falls by 0.3 where a position depends on a sink, by 0.1 elsewhere; the control changes nothing."""
    run = dl.denoise(tiny("llada"), PROMPTS, **RUN)
    predicted = run.masked[:-1] & run.attention_mask
    generator = torch.Generator().manual_seed(0)
    dependence = torch.rand(predicted.shape, generator=generator)
    blank = torch.zeros(predicted.shape).masked_fill(~predicted, torch.nan)
    found = SinkMechanism(
        run=run, dependence=dependence, predicted=predicted, confidence=blank, confidence_control=blank,
        later=blank[0], later_control=blank[0], tokens_changed=torch.zeros(2, 3), rule="planted", controls=(0,),
    )  # fmt: skip
    fall = torch.where(found.dependent, -0.3, -0.1).masked_fill(~predicted, torch.nan)
    answer = predicted[0]
    late = found.mean_dependence > found.mean_dependence.masked_fill(~answer, torch.nan).nanquantile(0.5, -1, True)
    later = torch.where(late, 2.0, -2.0).masked_fill(~answer, torch.nan)
    return replace(found, confidence=fall, later=later)


def test_a_planted_mechanism_is_found_with_its_size() -> None:
    found = planted()
    table = found.table().set_index(["measure", "masked"])
    line = table.loc[("confidence", "sinks")]
    assert (line.dependent, line.others, line.difference) == pytest.approx((-0.3, -0.1, -0.2))
    assert (line.beyond, line.beyond_low, line.beyond_high) == pytest.approx((-0.2, -0.2, -0.2))
    assert line.correlation < -0.7
    assert table.loc[("confidence", "random")].difference == 0
    line = table.loc[("steps later", "sinks")]
    assert (line.dependent, line.others, line.beyond) == pytest.approx((2.0, -2.0, 4.0))


def test_the_order_counts_what_both_kinds_of_runs_decided() -> None:
    found = planted()
    generator = torch.Generator().manual_seed(1)
    shape = found.later.shape
    later, control = (torch.randint(-3, 4, shape, generator=generator).float() for _ in range(2))
    lost = torch.rand(2, *shape, generator=generator) < 0.2
    known = found.predicted[0]
    later, control = (
        one.masked_fill(~known | gone, torch.nan) for one, gone in zip((later, control), lost, strict=True)
    )
    found = replace(found, later=later, later_control=control)
    lines = found.table().query("measure == 'steps later'").set_index("masked")
    values: dict[str, dict[bool, list[float]]] = {one: {True: [], False: []} for one in ("sinks", "random")}
    rhos: dict[str, list[float]] = {"sinks": [], "random": []}
    for row in range(3):
        both = [i for i in known[row].nonzero()[:, 0].tolist() if later[row, i] == later[row, i]]
        both = [i for i in both if control[row, i] == control[row, i]]
        mass = [float(found.mean_dependence[row, i]) for i in both]
        for name, one in (("sinks", later), ("random", control)):
            for i, each in zip(both, mass, strict=True):
                values[name][each > np.median(mass)].append(float(one[row, i]))
            ranks = [pd.Series(each).rank() for each in (mass, one[row, both].tolist())]
            rhos[name].append(np.corrcoef(*ranks)[0, 1])
        assert 3 < len(both) < int(known[row].sum())
    for name, line in lines.iterrows():
        assert line.dependent == pytest.approx(np.mean(values[str(name)][True]))
        assert line.others == pytest.approx(np.mean(values[str(name)][False]))
        assert line.correlation == pytest.approx(np.mean(rhos[str(name)]), rel=1e-6)


def test_dependent_is_above_the_median_of_a_canvas() -> None:
    found = planted()
    for step in range(4):
        for row in range(3):
            predicted = found.predicted[step, row].nonzero()[:, 0].tolist()
            if not predicted:
                continue
            middle = np.median([float(found.dependence[step, row, i]) for i in predicted])
            wanted = {i for i in predicted if float(found.dependence[step, row, i]) > middle}
            assert set(found.dependent[step, row].nonzero()[:, 0].tolist()) == wanted
    rho = []
    values = found.confidence
    for step in range(4):
        for row in range(3):
            kept = found.predicted[step, row]
            if kept.any() and values[step, row][kept].unique().numel() > 1:
                ranks = [pd.Series(t[step, row][kept]).rank() for t in (found.dependence, values)]
                rho.append(np.corrcoef(*ranks)[0, 1])
    assert found.table().correlation[0] == pytest.approx(np.mean(rho), rel=1e-6)


def test_what_has_no_order_to_choose_is_refused() -> None:
    with pytest.raises(ValueError, match="takes a DLM"):
        sink_mechanism(tiny("causal"), PROMPTS, RULE, gen_length=4)
    with pytest.raises(ValueError, match="one control at least"):
        sink_mechanism(tiny("llada"), PROMPTS, RULE, controls=(), **RUN)
    with pytest.raises(ValueError, match=r"controls is 1\.5; give at least one control as a whole number"):
        sink_mechanism(tiny("llada"), PROMPTS, RULE, controls=1.5, **RUN)
    with pytest.raises(ValueError, match="there is no sink"):
        sink_mechanism(tiny("llada"), PROMPTS, dl.AboveMean(1000.0), **RUN)


BLOCKS: dict[str, dict[str, Any]] = {
    "bd3lm": {"temperature": 0.0, "gen_length": 8, "seed": [3, 4]},
    "sdar": {"temperature": 0.0, "gen_length": 8, "remasking": "sequential", "seed": [3, 4]},
    "nemotron_labs_diffusion": {"gen_length": 8, "block_length": 4, "parallel": False, "seed": [3, 4]},
}


# The random network's patterns are even.
RULES = {"nemotron_labs_diffusion": 0.1}


@pytest.mark.parametrize("family", BLOCKS)
def test_known_sinks_of_block_diffusion_are_those_of_every_row_alone(family: str) -> None:
    """A step sees a prefix of the canvas, and rows of unequal prompts have blocks at unequal positions."""
    model, settings = tiny(family), BLOCKS[family]
    rule = dl.AboveMean(RULES.get(family, 1.0))
    together = sink_mechanism(model, PROMPTS[:2], rule, controls=(1,), **settings)
    run = together.run
    assert together.predicted.equal(run.masked[:-1] & run.in_block & run.attention_mask)
    for row in range(2):
        single = sink_mechanism(
            model, PROMPTS[row : row + 1], rule, controls=(1,), **{**settings, "seed": settings["seed"][row]}
        )
        padding = int(run.padding[row])
        width = min(run.tokens.shape[1] - padding, single.run.tokens.shape[1])
        # In the batch a row whose block is decided waits for the others.
        steps, own = (one.predicted[:, at].any(-1) for one, at in ((together, row), (single, 0)))
        for name in ("confidence", "dependence"):
            found = getattr(together, name)[steps, row, padding : padding + width]
            expected = getattr(single, name)[own, 0, :width]
            kept = single.predicted[own, 0, :width]
            assert kept.sum() == single.predicted.sum()
            torch.testing.assert_close(found[kept], expected[kept], atol=1e-5, rtol=1e-4)
        assert single.confidence.nan_to_num().abs().max() > 1e-4
    rec = dl.record(model, PROMPTS[:2], **settings)
    # In the first layer, which no hook has changed, the sinks that were measured are those of the pass itself.
    known, own = (
        replay(model, rec.run, [dl.hooks.at_layers(hook, [0])], attention=False)
        for hook in (mask_sinks(source=dl.find_sinks(rec, rule)), mask_sinks(rule))
    )
    torch.testing.assert_close(known.confidence_hooked, own.confidence_hooked, equal_nan=True)
    longer = dl.find_sinks(dl.record(model, PROMPTS[:2], **{**settings, "gen_length": 16}), rule)
    with pytest.raises(ValueError, match="give one of the same prompts, length and model"):
        replay(model, rec.run, [mask_sinks(source=longer)], attention=False)


def test_a_cache_has_a_mechanism_too() -> None:
    model, settings = tiny("llada"), {"gen_length": 8, "block_length": 4, "steps": 8, "seed": 3}
    found = sink_mechanism(model, PROMPTS[:2], RULE, controls=(1,), cache="dual", **settings)
    assert any(found.run.computed)
    assert found.dependence[found.predicted].isfinite().all()
    assert found.confidence[found.predicted].isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 7])
def test_controls_may_decode_other_numbers_of_blocks(seed: int) -> None:
    """A row ends with the block that holds its end of the text, which a hook may move."""
    model = tiny("a2d_qwen3", seed=seed, sampler="dllm_blocks", eos_token_id=5)
    with torch.no_grad():
        model.lm_head.weight[5] *= 3
    settings: dict[str, Any] = {"gen_length": 10, "temperature": 1.0, "block_length": 2, "seed": seed}
    prompt = [[20, 21, 22, 23]]
    found = sink_mechanism(model, prompt, dl.AboveMean(0.2), **settings)
    plain = found.run
    own = mask_sinks(dl.AboveMean(0.2))
    hooks = [own, *(mask_random(like=own, seed=s) for s in (0, 1, 2))]
    runs = [dl.denoise(model, prompt, hooks=[hook], **settings) for hook in hooks]
    assert len({run.tokens.shape for run in runs[1:]}) > 1
    begin, size = plain.prompt_length, plain.tokens.shape[1]
    later = [decoded(model, run)[:, :size] - decoded(model, plain) for run in runs]
    # A position that one of the two runs does not have counts as changed.
    changed = [run.tokens.shape[1] - size + int((run.tokens[:, :size] != plain.tokens).sum()) for run in runs]
    for values, wanted in ((found.later, later[0]), (found.later_control, sum(later[1:]) / 3)):
        assert values[:, :begin].isnan().all()
        torch.testing.assert_close(values[:, begin:].double(), wanted[:, begin:], rtol=0, atol=1e-6)
    assert found.tokens_changed[:, 0].tolist() == pytest.approx([changed[0], sum(changed[1:]) / 3])


def decoded(model: Any, run: dl.DenoisingRun) -> torch.Tensor:
    """The step at which each position was decoded: how many canvases before the last hold its mask."""
    return (run.canvases[:-1] == model.config.mask_token_id).sum(0).double()
