"""Copies of a model: `copy.deepcopy`, pickle and `torch.save`."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import HookPoint, attach_hooks, is_hooked_attention
from dlm_lens.hooks import ablate
from dlm_lens.testing import tiny

IDS = [5, 9, 14]
MODELS: dict[str, dict[str, Any]] = {
    "llada": {},
    "mmada": {},
    "dream": {},
    "smdm": {},
    "causal": {},
    "sink_llama": {},
    "sink_qwen": {"num_sinks": 2, "gated_attention": True, "zero_sink_value": True},
}


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 -- our own bytes


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, by_pickle, by_torch]


def same_model(model: Any, copied: Any) -> None:
    """Equal numbers from modules and weights of its own, hook points among them."""
    assert type(copied) is type(model)
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in model.named_modules()]
    mine, theirs = dl.record(model, [IDS], gen_length=4), dl.record(copied, [IDS], gen_length=4)
    assert torch.equal(mine.run.canvases, theirs.run.canvases)
    assert torch.equal(mine.received.nan_to_num(), theirs.received.nan_to_num())
    with torch.no_grad():
        before = model(mine.run.tokens).logits
        assert torch.equal(copied(mine.run.tokens).logits, before)
        copied.model.layers[0].self_attn.o_proj.weight.zero_()
        assert torch.equal(model(mine.run.tokens).logits, before)
        assert not torch.equal(copied(mine.run.tokens).logits, before)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("family", MODELS)
def test_a_copy_of_an_idle_model(family: str, way: Callable[[Any], Any]) -> None:
    model = tiny(family, **MODELS[family])
    same_model(model, way(model))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_model_with_listeners_is_not_copied(way: Callable[[Any], Any]) -> None:
    model = tiny("llada")
    for listening in (
        attach_hooks(model, ablate("z", value="zero")),
        dl.record_forward(model, [dl.ReceivedAttention()]),
    ):
        # pickle stumbles over a hook that is no function of a module, which is torch's own refusal.
        kinds = RuntimeError if way is copy.deepcopy else (RuntimeError, AttributeError, pickle.PicklingError)
        with listening, pytest.raises(kinds, match=r"cannot be copied: the copy would keep them|Can't pickle"):
            way(model)
    way(model)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_copy_of_a_model_with_a_host(way: Callable[[Any], Any]) -> None:
    model = tiny("llada")
    lm = dl.DiffusionLM(model, check=False)
    model.model.compile(backend="eager")
    copied = way(model)
    assert not any(module._forward_hooks for module in copied.modules() if isinstance(module, HookPoint))
    for module in copied.modules():
        if is_hooked_attention(module):
            assert module.hook_z.readers == ()
            assert (module.lock.owner, module.lock.depth, module.lock.listeners) == (None, 0, 0)
        assert not getattr(module, "trace_readers", ())
        assert getattr(module, "_compiled_call_impl", None) is None
    same_model(model, copied)
    # The original's host follows it as before, and the copy takes a host of its own.
    for host in (lm, dl.DiffusionLM(copied, check=False)):
        with host.trace(torch.tensor([IDS])):
            pattern = host.layers[1].attn.pattern.save()
        assert pattern.shape == (1, 4, 3, 3)


@pytest.mark.long
def test_a_pickled_model_opens_in_another_process(tmp_path: Path) -> None:
    model = tiny("sink_qwen", num_sinks=1)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch, dlm_lens as dl\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(dl.denoise(model, [5, 9, 14], gen_length=4).tokens.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(dl.denoise(model, IDS, gen_length=4).tokens.tolist())
