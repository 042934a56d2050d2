"""What a trace computes only where it is read, and what its tracer explains."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.testing import tiny

RUN = {"steps": 4, "gen_length": 8, "block_length": 8}


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
