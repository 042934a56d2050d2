"""`replay`, `logit_lens` and `sink_writes` of runs with an approximate cache, against float64 with stale keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import ablate
from dlm_lens.testing import tiny
from tests.reference import normed
from tests.sampling.stale import span_of, stale64

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "seed": 1, "threshold": 0.1}
CASES = [(name, cache) for name in ("llada", "dream") for cache in ("prefix", "dual")]
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: Any) -> tuple[Any, dl.DenoisingRun, int]:
    """A model, its run, and by how many positions the output that predicts a position comes before it."""
    name, cache = request.param
    model = tiny(name)
    run = dl.denoise(model, PROMPTS, cache=cache, **RUN)
    assert any(run.computed)
    return model, run, int(name == "dream")


def predicted_of(run: dl.DenoisingRun, step: int, shift: int) -> Tensor:
    """The masks that a step predicts: all, or those from the block's start to the end of what it computes."""
    masked, span = run.masked[step], span_of(run, step, shift=bool(shift))
    if span is None:
        return masked
    where = torch.arange(masked.shape[1])
    return masked & (where >= run.spans[step][0]) & (where < span[1])


def edits() -> dict[tuple[int, str], Any]:
    """What `ablate("z", layers=...)` of layer 0, head 1 does."""

    def off(value: Tensor) -> Tensor:
        return value.index_fill(2, torch.tensor([1]), 0.0)

    return {(0, "z"): off}


def test_replay_is_the_network_with_stale_keys(case: tuple[Any, dl.DenoisingRun, int]) -> None:
    model, run, shift = case
    hook = dl.hooks.at_layers(dl.hooks.at_heads(ablate("z"), [1]), [0])
    found = dl.replay(model, run, [hook], min_viewers=1)
    largest = 0.0
    for step in range(run.steps):
        asked = predicted_of(run, step, shift)
        assert found.predicted[step].equal(asked)
        for row in range(2):
            keep = run.attention_mask[row]
            one = stale64(model, run, step, row)
            two = stale64(model, run, step, row, edits=edits(), whole_edits=edits())
            # Row by row a position's place is its number among the row's own.
            place = keep.long().cumsum(0) - 1
            for position in asked[row].nonzero().flatten().tolist():
                at = max(int(place[position]) - shift, 0)
                logs = [kept["logits"][0, at].log_softmax(-1) for kept in (one, two)]
                kl = float((logs[0].exp() * (logs[0] - logs[1])).sum())
                largest = max(largest, kl)
                assert float(found.kl[step, row, position]) == pytest.approx(kl, abs=1e-5, rel=1e-3)
                likely = logs[0].clone()
                likely[model.config.mask_token_id] = -torch.inf
                assert float(found.confidence[step, row, position]) == pytest.approx(
                    float(likely.max().exp()), abs=1e-5
                )
            span = span_of(run, step, shift=bool(shift)) or (0, run.tokens.shape[1])
            here = torch.zeros_like(keep)
            here[slice(*span)] = True
            assert found.received is not None
            assert found.received_hooked is not None
            for layer in range(2):
                for kept, received in ((one, found.received), (two, found.received_hooked)):
                    if not run.masked[step:, row].any():  # the row has its answer
                        assert received.values[step, row].isnan().all()
                        continue
                    sums = kept[f"pattern{layer}"][0][:, here[keep]].sum(-2)
                    expected = received.expected[step, row, 0, 0, keep].double()
                    values = received.values[step, row, layer][:, keep].double()
                    torch.testing.assert_close(values * expected, sums, **CLOSE)
    assert largest > 1e-3


def test_the_lens_reads_what_a_step_computes(case: tuple[Any, dl.DenoisingRun, int]) -> None:
    model, run, _ = case
    weights = {name: value.double() for name, value in model.state_dict().items()}
    steps = [step for step, span in enumerate(run.computed) if span][1:4:2]  # their whole passes are run first
    lens = dl.logit_lens(model, run, steps=steps)
    where = torch.arange(run.tokens.shape[1])
    for step in steps:
        start, stop = run.computed[step]  # type: ignore[misc]
        for row in range(2):
            keep = run.attention_mask[row]
            chosen = (lens.step == step) & (lens.batch == row)
            if not run.masked[step:, row].any():
                assert not chosen.any()
                continue
            assert lens.position[chosen].tolist() == where[keep & (where >= start) & (where < stop)].tolist()
            kept = stale64(model, run, step, row)
            for entry in chosen.nonzero().flatten().tolist():
                at = int(keep[: lens.position[entry]].sum())
                for layer in range(2):
                    state = normed(
                        kept[f"resid{layer}"][0, at], weights["model.norm.weight"], model.config.rms_norm_eps
                    )
                    log = (state @ weights["lm_head.weight"].T).log_softmax(-1)
                    entropy = float(-(log.exp() * log).sum())
                    assert float(lens.entropy[entry, layer]) == pytest.approx(entropy, abs=2e-4)


def test_hooks_of_the_lens_act_in_the_pass_that_left_the_keys(case: tuple[Any, dl.DenoisingRun, int]) -> None:
    """Also where the steps are chosen, and where hooks want a pass without hooks."""
    model, run, _ = case
    step = [step for step, span in enumerate(run.computed) if span][1]
    hook = dl.hooks.at_layers(dl.hooks.at_heads(ablate("z"), [1]), [0])
    lens = dl.logit_lens(model, run, steps=[step], hooks=[hook])
    assert lens.hooked is not None
    weights = {name: value.double() for name, value in model.state_dict().items()}
    for entry in range(len(lens.position)):
        row = int(lens.batch[entry])
        kept = stale64(model, run, step, row, edits=edits(), whole_edits=edits())
        at = int(run.attention_mask[row][: lens.position[entry]].sum())
        state = normed(kept["resid1"][0, at], weights["model.norm.weight"], model.config.rms_norm_eps)
        log = (state @ weights["lm_head.weight"].T).log_softmax(-1)
        assert float(lens.hooked.entropy[entry, 1]) == pytest.approx(float(-(log.exp() * log).sum()), abs=2e-4)
    clean = dl.hooks.mask_top_sinks(1, source="clean")
    every = dl.replay(model, run, [clean], min_viewers=1)
    one = dl.logit_lens(model, run, steps=[step], hooks=[clean])
    assert one.hooked is not None
    for entry in one.predicted.nonzero().flatten().tolist():
        row, position = int(one.batch[entry]), int(one.predicts[entry])
        found = (
            one.hooked.top_probabilities[entry, 1, 0] if int(one.hooked.top_tokens[entry, 1, 0]) != MASK else None
        )
        if found is not None:
            assert float(found) == pytest.approx(float(every.confidence_hooked[step, row, position]), abs=1e-5)
    kept = dl.hooks.capture(model, run, "resid", cache_steps=[step])
    assert kept.values["resid", 1, step].shape[1] == run.computed[step][1] - run.computed[step][0]  # type: ignore[index]


MASK = 63


def test_sink_writes_are_of_the_kept_values(case: tuple[Any, dl.DenoisingRun, int]) -> None:
    model, run, _ = case
    sinks = dl.find_sinks(dl.received_over_steps(model, run, min_viewers=1), dl.TopK(1))
    steps = [step for step, span in enumerate(run.computed) if span][1:4:2]
    writes = dl.probes.sink_writes(model, run, sinks, steps=steps)
    stale = 0
    for entry in range(len(writes.step)):
        step, row, layer, head = (int(getattr(writes, name)[entry]) for name in ("step", "batch", "layer", "head"))
        position = int(writes.position[entry])
        kept, keep = stale64(model, run, step, row), run.attention_mask[row]
        at, width = int(keep[:position].sum()), kept["v0"].shape[-1]
        value = kept[f"v{layer}"][0, at, head // (4 // kept["v0"].shape[2])]
        output = model.state_dict()[f"model.layers.{layer}.self_attn.o_proj.weight"].double()
        vector = output[:, head * width : (head + 1) * width] @ value
        assert float(writes.norm[entry]) == pytest.approx(float(vector.norm()), rel=1e-4)
        start, stop = run.computed[step]  # type: ignore[misc]
        stale += not start <= position < stop
    assert stale
