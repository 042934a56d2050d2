"""Models that rotate in float32 give a cache keys in the dtype of the values."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from dlm_lens.attention import hooked_attentions
from dlm_lens.attention.cache_argument import returned_cache
from dlm_lens.testing import tiny

MODELS: dict[str, dict[str, Any]] = {
    "llada": {},
    "mmada": {},
    "smdm": {},
    "smdm_gate": {"family": "smdm", "gated_attention": True},
}
IDS = torch.arange(5, 17).view(2, 6)


def model_of(name: str, dtype: torch.dtype) -> Any:
    return tiny(**{"family": name, **MODELS[name]}).to(dtype)


def one_dtype(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """The first update of a layer in transformers 5.22 and 5.23, whose values have the dtype of the keys."""
    layer.dtype, layer.device = key_states.dtype, key_states.device
    layer.keys = torch.tensor([], dtype=layer.dtype, device=layer.device)
    layer.values = torch.tensor([], dtype=layer.dtype, device=layer.device)
    layer.is_initialized = True


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_plain_pass_with_a_cache(
    name: str, dtype: torch.dtype, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output projection refused values that such a cache had turned into float32."""
    if older:
        monkeypatch.setattr(DynamicLayer, "lazy_initialization", one_dtype)
    model = model_of(name, dtype)
    seen: list[Tensor] = []
    point = hooked_attentions(model)[0].hook_rot_k
    handle = point.register_forward_hook(lambda module, inputs, output: seen.append(output.transpose(1, 2)))
    whole = model(IDS, use_cache=False).logits
    handle.remove()
    output = model(IDS, use_cache=True)
    assert output.logits.equal(whole)
    layers = returned_cache(output).layers
    assert {layer.keys.dtype for layer in layers} == {layer.values.dtype for layer in layers} == {dtype}
    # What is kept is what attention computes with.
    assert any(layers[0].keys.equal(each) for each in (seen[0], seen[0].transpose(1, 2)))
    later = model(IDS[:, :1], use_cache=True, past_key_values=returned_cache(output)).logits
    assert later.dtype == dtype
    assert bool(later.isfinite().all())


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_copies_and_pickles(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    want = model(IDS, use_cache=True).logits
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # our own
        assert again(IDS, use_cache=True).logits.equal(want)
