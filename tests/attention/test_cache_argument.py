"""Both names of the cache of keys and values: that of transformers since 5.24, and that of before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import dlm_lens as dl
from dlm_lens.attention.cache_argument import CURRENT, cache_argument, given_cache, returned_cache
from dlm_lens.testing import tiny

IDS = torch.arange(3, 11)[None]


class Old(nn.Module):
    def forward(self, ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return past_key_values


class New(Old):
    def forward(self, ids: Any, cache: Any = None, **kwargs: Any) -> Any:
        return cache

    def of_parent(self) -> dict[str, Any]:
        return cache_argument(super().forward, 3)


def test_a_network_gets_the_cache_under_its_own_name() -> None:
    assert cache_argument(Old(), 3) == {"past_key_values": 3}
    assert cache_argument(New(), 3) == {"cache": 3}
    assert New().of_parent() == {"past_key_values": 3}
    assert cache_argument(lambda cache: cache, 3) == {"cache": 3}
    assert cache_argument(lambda **given: given, 3) == {CURRENT: 3}
    replaced: Any = New()
    replaced.forward = lambda *args, **kwargs: None  # as accelerate does
    assert cache_argument(replaced, 3) == {"cache": 3}


def test_a_cache_is_found_under_either_name() -> None:
    assert given_cache({"past_key_values": 3}) == given_cache({"cache": 3, "past_key_values": None}) == 3
    assert given_cache({}) is None
    assert returned_cache(SimpleNamespace(cache=3)) == returned_cache(SimpleNamespace(past_key_values=3)) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_attention_of_a_bridge_keeps_keys_under_either_name(name: str) -> None:
    model = tiny("causal", model_type="qwen2")
    tl, kept = dl.bridge(model), DynamicCache()
    tables = model.model.rotary_emb(torch.zeros(1, 3, model.config.hidden_size), torch.arange(3)[None])
    states = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        tl.blocks[0].attn(hidden_states=states, attention_mask=None, position_embeddings=tables, **{name: kept})
    assert kept.get_seq_length() == 6
    assert kept.layers[0].keys[:, :, :3].equal(kept.layers[0].keys[:, :, 3:])


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "whole"),
    [(family, whole) for family in ("fast_dllm_v2", "bd3lm", "wedlm") for whole in (True, False)]
    + [("llada", True), ("diffugpt", True)],  # their decoders are of transformers
)
def test_own_networks_take_it_under_either_name(family: str, whole: bool) -> None:
    model = tiny(family)
    network, found = model if whole else model.get_decoder(), []
    for name in ("cache", "past_key_values"):
        kept = DynamicCache()
        network(IDS[:, :4], use_cache=True, **{name: kept})
        found.append(network(IDS[:, 4:8], use_cache=True, **{name: kept})[0])
        assert kept.get_seq_length() == 8
    assert found[0].equal(found[1])
