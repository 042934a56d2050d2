"""What is measured for an ablation does not include steps after the end of a row."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_top_sinks, mean_activations, zero_value
from dlm_lens.sampling.run_rows import steps_with_work
from dlm_lens.testing import tiny
from tests.recording.test_rows_that_end import ENDS, model_and_settings


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("hooks", [[], [zero_value(0)], [mask_top_sinks(1)]])
@pytest.mark.parametrize(("family", "end"), ENDS)
def test_means_of_a_batch_are_those_of_its_rows_alone(family: str, end: str, hooks: list) -> None:
    model, settings, prompts = model_and_settings(family, end)
    run = dl.denoise(model, prompts, hooks=hooks, **settings)
    if not hooks:
        assert not bool(run.running.all())
    for site in ("z", "resid"):
        both = mean_activations(model, prompts, site, bins=1, hooks=hooks, **settings)
        alone = [mean_activations(model, [prompt], site, bins=1, hooks=hooks, **settings) for prompt in prompts]
        added = alone[0] + alone[1]
        assert both.counts.equal(added.counts)
        # The same activations from batches of another size: float32 products in another order.
        torch.testing.assert_close(both.means, added.means, rtol=1e-4, atol=1e-5)


WAITING: dict[str, dict] = {
    "sdar": {"gen_length": 8},
    "bd3lm": {"gen_length": 8},
    "stable_diffcoder": {"gen_length": 8},
    "efficient_dlm": {"gen_length": 8, "threshold": 0.03, "block_length": 4},
}


@pytest.mark.parametrize("family", WAITING)
def test_steps_at_which_a_row_waits_for_others_do_not_count(family: str) -> None:
    """Rows whose first block shares the prompt's rest have fewer masks in it, and are done with it first."""
    model, settings = tiny(family), {"seed": 0, **WAITING[family]}
    prompts = [[5, 9, 14, 20, 3], [7, 8, 9], [11, 12]]
    run = dl.denoise(model, prompts, **settings)
    alone = [dl.denoise(model, [prompt], **settings) for prompt in prompts]
    found = steps_with_work(run)
    assert found.sum(0).tolist() == [one.steps for one in alone]
    assert not torch.equal(found, run.running)
    assert all(bool(steps_with_work(one).all()) for one in alone)
    both = mean_activations(model, prompts, "resid", bins=3, **settings)
    each = [mean_activations(model, [prompt], "resid", bins=3, **settings) for prompt in prompts]
    added = each[0] + each[1] + each[2]
    assert both.counts.equal(added.counts)
    # The same activations from batches of another size: float32 products in another order.
    torch.testing.assert_close(both.means, added.means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", ["dmax", "llada2_editing", "llada2_levenshtein"])
def test_steps_without_open_positions_count_in_samplers_that_rewrite(sampler: str) -> None:
    """A row alone has such steps too, in which a full block is rewritten, or found settled."""
    run = dl.denoise(tiny("llada2", sampler=sampler), [[5, 9, 14, 20, 3]], gen_length=8, seed=0)
    assert bool(run.running.all())
    assert not bool((run.in_block & run.open[:-1]).any(-1).all())
    assert bool(steps_with_work(run).all())
