"""Nodes of an earlier pass, whose keys and values a later step reads from a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import attach_hooks
from dlm_lens.hooks import ablate, at_heads, at_layers
from dlm_lens.probes import LogProbability, activation_patching, attribution_patching
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.testing import tiny

PROMPTS, OTHERS = [[1, 2, 3, 4, 5], [8, 9, 10]], [[1, 2, 30, 4, 5], [8, 19, 20]]
CACHED: dict[str, Any] = {"steps": 8, "gen_length": 8, "block_length": 4, "cache": "prefix"}


def by_hand(model: Any, run: DenoisingRun, step: int, hook: Any) -> Tensor:
    """Log-probabilities of what a step decides, after a pass with the hook on the canvas whose keys it reads."""
    stored = StoredRun(model, run)
    whole = max(i for i, span in enumerate(run.computed[:step]) if span is None)
    with torch.no_grad():
        with attach_hooks(model, hook) if hook is not None else attach_hooks(model):
            stored.states(whole)
        logs = stored.logits(stored.states(step)).double()
    logs[:, model.config.mask_token_id] = -torch.inf
    logs, found = logs.log_softmax(-1), torch.zeros(len(run.tokens), dtype=torch.float64)
    for entry, (row, place) in enumerate(stored.predicted(step).nonzero().tolist()):
        if run.unmasked[step, row, place]:
            found[row] += logs[entry, run.tokens[row, place]]
    return found


@pytest.fixture(name="case")
def _case() -> tuple[Any, DenoisingRun, int]:
    model = tiny("llada").double()
    run = dl.denoise(model, PROMPTS, **CACHED)
    step = next(i for i, span in enumerate(run.computed) if span is not None and i > 4)
    return model, run, step


def test_effects_are_those_of_a_pass_with_the_node_zeroed(case: tuple[Any, DenoisingRun, int]) -> None:
    model, run, step = case
    given: dict[str, Any] = {"target": LogProbability(), "steps": [step], "kept": True}
    found = activation_patching(model, run, "zero", batch=3, **given)
    base = by_hand(model, run, step, None)
    torch.testing.assert_close(found.base[0].double(), base)
    for head in range(4):
        wanted = by_hand(model, run, step, at_heads(at_layers(ablate("z"), [0]), [head])) - base
        torch.testing.assert_close(found.effects[0, :, 0, head, 0], wanted, atol=1e-9, rtol=1e-6)
        assert float(wanted.abs().max()) > 1e-6
    # The last layer's heads write after all keys and values were formed.
    assert float(found.effects[:, :, -1].abs().max()) < 1e-12
    now = activation_patching(model, run, "zero", target=LogProbability(), steps=[step])
    assert float((now.effects - found.effects).abs().max()) > 1e-3
    assert set(found.contract.differences(now.contract)) == {"process", "fixed"}


@pytest.mark.parametrize("site", ["z", "k", "v"])
def test_gradients_reach_the_earlier_pass(case: tuple[Any, DenoisingRun, int], site: str) -> None:
    model, run, step = case
    embedding, made = model.get_input_embeddings().weight.data, torch.Generator().manual_seed(0)
    for one, other in ((3, 30), (9, 19), (10, 20)):
        embedding[other] = embedding[one] + 1e-3 * torch.randn(embedding.shape[1], generator=made)
    given: dict[str, Any] = {"target": LogProbability(), "steps": [step], "kept": True}
    exact = activation_patching(model, run, OTHERS, site, **given)
    found = attribution_patching(model, run, OTHERS, site, **given)
    largest = float(exact.effects.abs().max())
    assert largest > 1e-7
    torch.testing.assert_close(found.effects, exact.effects, atol=0.02 * largest, rtol=0.0)
    before = attribution_patching(model, run, OTHERS, site, target=LogProbability(), steps=[step])
    assert not torch.allclose(before.effects, found.effects)


def test_what_reads_no_kept_keys_is_refused(case: tuple[Any, DenoisingRun, int]) -> None:
    model, run, _ = case
    plain = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    with pytest.raises(ValueError, match="no step of this run reads keys and values of an earlier one"):
        activation_patching(model, plain, OTHERS, kept=True)
    with pytest.raises(ValueError, match="step 0 computes the whole canvas; these read kept keys of one"):
        attribution_patching(model, run, OTHERS, kept=True, steps=[0])
    with pytest.raises(ValueError, match="no hooks and no 'mean'"):
        activation_patching(model, run, "mean", kept=True, steps=[1])
    with pytest.raises(ValueError, match="grad_drop is of one pass"):
        attribution_patching(model, run, OTHERS, kept=True, grad_drop=True, steps=[1])
