"""What modules hand over in a trace: counts as nnsight's own, and queries and keys from where they are computed."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nnsight import NNsight
from nnsight.intervention.source import Controller
from torch import nn

import dlm_lens as dl
from dlm_lens.testing import tiny
from dlm_lens.tracing.controllers import ModuleController, VisitCounts

RUN = {"steps": 4, "gen_length": 8, "block_length": 8}


@pytest.fixture
def lm() -> dl.DiffusionLM:
    return dl.DiffusionLM(tiny("llada", num_hidden_layers=2))


def projected(lm: Any, name: str = "q_proj") -> list[torch.Tensor]:
    """The projection's output at every step, recorded by a PyTorch hook in a run without a trace."""
    found: list[torch.Tensor] = []
    module = lm.layers[1].attn._module.get_submodule(name)
    handle = module.register_forward_hook(lambda _module, _inputs, output: found.append(output.clone()))
    lm.generate([1, 2, 3], **RUN)
    handle.remove()
    return found


def counted_by_nnsight(lm: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The visits of a trace with nnsight's controllers."""
    with monkeypatch.context() as patch:
        patch.setattr(ModuleController, "__call__", Controller.__call__)
        return counts(lm)


def counts(lm: Any) -> dict[str, int]:
    """The visits of a trace that reads a late value of every other step, and an output from inside its module."""
    with lm.generate([1, 2, 3], **RUN) as tracer:
        for _step in tracer.steps[::2]:
            lm.layers[0].attn.v.clone()
            lm.layers[0].output.clone()
            lm.layers[1].mlp.output.clone()
    return dict(lm.interleaver.counts)


def test_visits_are_counted_as_nnsight_counts_them(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = counts(lm), counted_by_nnsight(lm, monkeypatch)
    points = {place for place in ours if ".hook_q." in place or ".hook_k." in place}
    assert {place: count for place, count in ours.items() if place not in points} == theirs
    assert {ours[place] for place in points} == {4}  # once a step, although no PyTorch hook serves them
    assert len(points) == 2 * 2 * 3


def test_a_module_that_the_block_calls_itself_is_not_counted(lm: Any) -> None:
    expected = counts(lm)
    with lm.generate([1, 2, 3], **RUN) as tracer:
        for _step in tracer.steps[::2]:
            lm.layers[0].attn.v.clone()
            value = lm.layers[0].output.clone()
            lm.layers[1].mlp(lm.layers[0].mlp(value))
            lm.layers[1].mlp.output.clone()
    assert dict(lm.interleaver.counts) == expected


@pytest.mark.parametrize("failing", [False, True])
def test_no_controller_knows_a_trace_that_is_over(lm: Any, failing: bool) -> None:
    expected = lm.generate([1, 2, 3], **RUN).canvases
    try:
        with lm.generate([1, 2, 3], **RUN) as tracer:
            for _step in tracer.steps:
                value = lm.layers[1].mlp.output
                assert not failing, value.shape
    except AssertionError:
        assert failing
    found = [each for each in lm._module.modules() if isinstance(vars(each).get("forward"), ModuleController)]
    assert len(found) > 20
    assert all(vars(each)["forward"].traced is None for each in found)
    assert not any(traced.awaited for traced in lm.interleaver.counts.modules.values())
    assert torch.equal(lm.generate([1, 2, 3], **RUN).canvases, expected)


def test_counts_are_a_mapping() -> None:
    found = VisitCounts()
    traced = found.of_module("model.a")
    assert found.of_module("model.a") is traced
    traced.outputs += 3
    found["step"] = 1
    found["model.a.input"] = 5
    assert dict(found) == {"model.a.input": 5, "model.a.output": 3, "step": 1}
    assert (found.get("model.a.skip", 0), found.get("other"), traced.inputs, traced.outputs) == (0, None, 5, 3)
    with pytest.raises(KeyError):
        found["model.a.skip"]
    found.clear()
    assert dict(found) == {}
    assert (traced.inputs, traced.skips, traced.outputs) == (0, 0, 0)


@pytest.mark.parametrize("before", ["q_proj.input", "q_proj.output", "input", "nothing"])
def test_queries_follow_any_value_before_them(lm: Any, before: str) -> None:
    expected = projected(lm)
    attention = lm.layers[1].attn
    with lm.generate([1, 2, 3], **RUN) as tracer:
        heads = [].save()
        for _step in tracer.steps[[1, 3]]:
            if before != "nothing":
                owner = attention.q_proj if before.startswith("q_proj") else attention
                getattr(owner, before.rpartition(".")[2])
            heads.append(attention.q.clone())
            assert not attention.q_proj._module._forward_hooks
    for step, found in zip((1, 3), heads, strict=True):
        assert torch.equal(found.flatten(-2), expected[step])


def test_keys_that_are_first_read_in_a_late_pass_are_those_of_that_pass(lm: Any) -> None:
    expected = projected(lm, "k_proj")
    with lm.generate([1, 2, 3], **RUN) as tracer:
        heads = [].save()
        for forward in tracer.iter[:4]:
            lm.layers[0].output.clone()
            if forward >= 2:
                heads.append(lm.layers[1].attn.k.clone())
    assert len(heads) == 2
    for found, wanted in zip(heads, expected[2:], strict=True):
        assert torch.equal(found.flatten(-2), wanted)


def test_a_cache_keeps_queries_that_nobody_reads(lm: Any) -> None:
    expected = projected(lm)
    with lm.generate([1, 2, 3], **RUN) as tracer:
        cache = tracer.cache(modules=[lm.layers[1].attn.hook_q])
    kept = cache["model.model.layers.1.self_attn.hook_q"].output
    assert len(kept) == 4
    for heads, flat in zip(kept, expected, strict=True):
        assert torch.equal(heads.flatten(-2), flat)


class Doubled(nn.Module):
    """What an adapter such as LoRA puts in the place of a projection."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.out_features = inner, inner.out_features

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(value)


@pytest.fixture
def replaced(lm: Any) -> Iterator[Any]:
    attention = lm.layers[1].attn._module
    plain = attention.q_proj
    attention.q_proj = Doubled(plain)
    yield lm
    attention.q_proj = plain


def test_a_projection_that_was_replaced_after_wrapping_is_read(replaced: Any) -> None:
    expected = projected(replaced)
    with replaced.generate([1, 2, 3], **RUN) as tracer:
        heads = [].save()
        for _step in tracer.steps:
            heads.append(replaced.layers[1].attn.q.clone())
    assert all(torch.equal(found.flatten(-2), wanted) for found, wanted in zip(heads, expected, strict=True))
    assert not replaced.layers[1].attn._module.q_proj._forward_hooks  # the trace's hook is gone


def test_a_users_hook_on_the_projection_belongs_to_the_queries(lm: Any) -> None:
    module = lm.layers[1].attn._module.q_proj
    handle = module.register_forward_hook(lambda _module, _inputs, output: output + 1)
    with lm.trace([1, 2, 3]):
        flat = lm.layers[1].attn.q_proj.output.clone().save()
        heads = lm.layers[1].attn.q.clone().save()
    handle.remove()
    assert torch.equal(heads.flatten(-2), flat + 1)


def test_an_edit_of_the_queries_changes_the_run_as_an_edit_of_the_projection(lm: Any) -> None:
    def logits(place: str) -> torch.Tensor:
        with lm.trace([1, 2, 3]):
            if place == "q":
                lm.layers[0].attn.q = lm.layers[0].attn.q * 3
            else:
                lm.layers[0].attn.q_proj.output = lm.layers[0].attn.q_proj.output * 3
            found = lm.lm_head.output.clone().save()
        return found

    with lm.trace([1, 2, 3]):
        plain = lm.lm_head.output.clone().save()
    assert torch.equal(logits("q"), logits("projection"))
    assert not torch.equal(logits("q"), plain)


def test_two_wrappers_of_one_model_read_their_own_traces() -> None:
    model = tiny("llada", num_hidden_layers=2)
    first, second = dl.DiffusionLM(model), dl.DiffusionLM(model)
    values = []
    for lm in (first, second, first):
        with lm.trace([1, 2, 3]):
            values.append(lm.layers[1].attn.q.clone().save())
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_of_a_wrapped_model_is_wrapped_anew(whole: bool) -> None:
    lm = dl.DiffusionLM(tiny("llada", num_hidden_layers=2))
    other = copy.deepcopy(lm) if whole else dl.DiffusionLM(copy.deepcopy(lm._module))
    with torch.no_grad():
        other.layers[1].attn._module.q_proj.weight.mul_(2)
    found = []
    for each in (lm, other):
        with each.trace([1, 2, 3]):
            found.append(each.layers[1].attn.q.clone().save())
    torch.testing.assert_close(found[1], 2 * found[0])


def test_another_wrapper_traces_a_model_whose_own_is_gone() -> None:
    model = tiny("llada", num_hidden_layers=2)
    lm = dl.DiffusionLM(model)
    with lm.trace([1, 2, 3]):
        expected = lm.layers[1].mlp.output.clone().save()
    del lm
    gc.collect()
    other = NNsight(model)
    with other.trace(input_ids=torch.tensor([[1, 2, 3]])):
        found = other.model.layers[1].mlp.output.clone().save()
    assert torch.equal(found, expected)
