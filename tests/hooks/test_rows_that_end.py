"""What is measured for an ablation does not include steps after the end of a row."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_top_sinks, mean_activations, zero_value
from tests.recording.test_rows_that_end import ENDS, model_and_settings


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
