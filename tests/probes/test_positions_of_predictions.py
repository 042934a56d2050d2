"""Where a prediction is made: outputs before the positions with a logit shift, positions that the pass computes."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.hooks import ablate, at_layers
from dlm_lens.recording import AttentionPattern, rerun
from dlm_lens.sampling import StoredRun
from dlm_lens.sinks import received_over_steps
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w2 w1", "w21 w22 w23 w24 w25 w26"]


def perturbed(family: str) -> Any:
    model, generator = tiny(family), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def test_a_replay_compares_the_state_that_predicts() -> None:
    """The output at 5 predicts position 6 alone: an edit of it changes this prediction and no other."""
    model = perturbed("dream")
    run = dl.denoise(model, PROMPTS[:2], steps=4, gen_length=8)
    last = [at_layers(ablate("resid", positions=[5]), [-1])]
    found = probes.replay(model, run, last)
    changed = (found.kl[0] > 1e-6) & found.predicted[0]
    assert changed.nonzero()[:, 1].tolist() == [6, 6]
    # One of the eight predictions of a row is made from an edited state, which has become zero.
    torch.testing.assert_close(found.residual_change[0, :, -1], torch.full((2,), 1 / 8))


@pytest.mark.parametrize("family", ["dream", "llada"])
def test_the_dependence_of_a_position_is_that_of_the_query_that_predicts_it(family: str) -> None:
    model, given = perturbed(family), {"steps": 4, "gen_length": 8, "controls": (0,)}
    found = probes.sink_mechanism(model, PROMPTS[:2], dl.AboveMean(0.3), **given)
    pattern = rerun(model, found.run, [AttentionPattern()]).pattern  # [step, batch, layer, head, query, key]
    sinks = dl.find_sinks(received_over_steps(model, found.run), dl.AboveMean(0.3)).is_sink
    mass = (pattern * sinks[..., None, :]).sum(-1).mean((2, 3))
    for position in range(1, found.run.tokens.shape[1]):
        query = position - (family == "dream")
        torch.testing.assert_close(found.dependence[..., position], mass[..., query], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("fast_dllm_v2", {}),
        ("sdar", {}),
        ("nemotron_labs_diffusion", {}),
        ("llada", {"cache": "dual"}),
        ("llada", {}),
    ],
    ids=["fast-dllm", "sdar", "nemotron", "cached", "whole"],
)
def test_controls_of_sinks_are_among_the_positions_that_a_step_computes(family: str, settings: Any) -> None:
    model = perturbed(family)
    run = dl.denoise(model, PROMPTS, gen_length=16, block_length=8, **settings)
    sinks = dl.find_sinks(received_over_steps(model, run, min_viewers=1), dl.AboveMean(1.5))
    lens = dl.logit_lens(model, run, positions=sinks)
    stored, anywhere = StoredRun(model, run), sinks.is_sink.any((2, 3))
    pairs = 0
    for step in range(run.steps):
        computed = stored.computes(step)
        for row in range(3):
            if step >= int(run.row_steps[row]):
                continue
            here = (lens.step == step) & (lens.batch == row)
            for masked in (False, True):
                of_kind = (run.masked[step, row] == masked) & computed[row] & run.attention_mask[row]
                there, free = (
                    int((of_kind & which).sum()) for which in (anywhere[step, row], ~anywhere[step, row])
                )
                own = here & (lens.masked == masked)
                assert int((own & lens.sink).sum()) == there
                assert int((own & ~lens.sink).sum()) == min(there, free)
                pairs += min(there, free)
    assert pairs > 0


@pytest.mark.parametrize(("block", "sub"), [(4, 4), (8, 4)])
def test_what_a_lens_marks_as_predicted_is_what_the_step_predicts(block: int, sub: int) -> None:
    model = perturbed("fast_dllm_v2")
    run = dl.denoise(model, PROMPTS, gen_length=16, block_length=block, sub_block_length=sub)
    lens, stored = dl.logit_lens(model, run), StoredRun(model, run)
    wanted = torch.stack([stored.predicted(step) for step in range(run.steps)])
    found = torch.zeros_like(wanted)
    found[lens.step[lens.predicted], lens.batch[lens.predicted], lens.predicts[lens.predicted]] = True
    assert bool(found.any())
    assert not bool((found & ~wanted).any())
