"""Modules pass nnsight by where nothing is read: same values, same counts."""

import pytest
import torch
from nnsight.intervention.source import Controller

import dlm_lens as dl
from dlm_lens.testing import tiny
from dlm_lens.tracing.tracers import RunController

RUN = {"steps": 4, "gen_length": 8, "block_length": 8}


def traced(lm):
    """Counts of every location, and values read and edited at modules with and without children."""
    with lm.generate([1, 2, 3], **RUN) as tracer:
        found, locations = [].save(), lm.interleaver.counts
        cache = tracer.cache(modules=[lm.layers[1].mlp.up_proj])
        for step in tracer.steps[1:]:
            found.append(lm.layers[0].attn.q_proj.input.sum())
            lm.layers[0].attn.q_proj.output = lm.layers[0].attn.q_proj.output * 0.5
            found.append(lm.layers[0].attn.pattern.sum(-2))
            if step == 2:
                lm.layers[1].mlp.down_proj.skip(torch.zeros(1, 11, 32))
            found.append(lm.layers[1].output[0].sum())
            found.append(lm.lm_head.output.sum())
        counts, run = dict(locations).save(), tracer.result.save()
    return found, counts, run, cache


def test_modules_pass_by_with_the_counts_and_values_of_nnsights_own_controllers():
    lm = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))
    assert all(isinstance(m.__dict__["forward"], RunController) for m in lm._module.modules())
    ours = traced(lm)
    plain = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))  # the same random weights
    for module in plain._module.modules():
        if isinstance(module.__dict__.get("forward"), RunController):
            module.__dict__["forward"] = Controller(module, module.__dict__["forward"].state)
    theirs = traced(plain)
    assert ours[1] == theirs[1]
    assert torch.equal(ours[2].canvases, theirs[2].canvases)
    for mine, own in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(mine, own)


def test_a_module_in_which_nothing_is_read_does_not_call_the_interleaver(monkeypatch: pytest.MonkeyPatch):
    lm = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))
    seen, handle = [], type(lm.interleaver).handle
    monkeypatch.setattr(
        type(lm.interleaver), "handle", lambda self, at, value: (seen.append(at), handle(self, at, value))[1]
    )
    with lm.generate([1, 2, 3], **RUN) as tracer:
        for _step in tracer.steps:
            lm.layers[0].attn.q_proj.output.sum()
    assert "model.model.layers.0.self_attn.q_proj.output" in seen
    assert "model.model.layers.0.self_attn.k_proj.output" not in seen
    assert "model.model.layers.0.output" not in seen


def test_queries_are_cut_into_heads_only_where_they_are_read():
    lm = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))
    points = [lm.layers[layer].attn._module.hook_q for layer in (0, 1)]
    calls = []
    for point in points:
        forward = type(point).forward
        point.__dict__["forward"].state.body = lambda self, value, forward=forward: (
            calls.append(self),
            forward(self, value),
        )[1]
    with lm.generate([1, 2, 3], **RUN) as tracer:
        heads = [].save()
        for step in tracer.steps:
            if step in (1, 3):
                heads.append(lm.layers[1].attn.q.clone())
    assert calls == [points[1]] * 2
    assert [tuple(each.shape) for each in heads] == [(1, 11, 4, 8)] * 2
    with lm.generate([1, 2, 3], **RUN) as tracer:
        projected = [].save()
        for _step in tracer.steps[[1, 3]]:
            projected.append(lm.layers[1].attn.q_proj.output.clone())
    for head, flat in zip(heads, projected, strict=True):
        assert torch.equal(head.flatten(-2), flat)


def test_a_call_beside_another_with_is_explained():
    lm = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))
    with torch.no_grad(): run = lm.generate([1, 2, 3], **RUN)  # fmt: skip  # noqa: E701
    with pytest.raises(AttributeError, match=r"call lm\.generate\(\.\.\.\) on a line of its own"):
        _ = run.canvases
    with pytest.raises(AttributeError, match="'RunTracer' object has no attribute 'nothing'"):
        _ = run.nothing
