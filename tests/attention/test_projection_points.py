"""`hook_q` and `hook_k` of attention modules with unusual projections, against the rule that they follow."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import dlm_lens as dl
from dlm_lens.attention import check_hook_points, hooked_attentions
from dlm_lens.hooks import ablate, at_heads, attach_hooks

QWEN3_NEXT = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 128, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
NANOCHAT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


def model_of(kind: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return dl.add_hook_points(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval())


def values_of(model: Any, ids: Tensor, *names: str) -> dict[str, Tensor]:
    """What the first attention layer has at these hook points."""
    found: dict[str, Tensor] = {}
    attention = hooked_attentions(model)[0]
    handles = [
        getattr(attention, f"hook_{name}").register_forward_hook(
            lambda module, args, out, name=name: found.setdefault(name, out) is None or None
        )
        for name in names
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("positions", [4, 7, 8, 9])
def test_a_query_projection_with_a_gate_has_its_heads_at_every_length(positions: int) -> None:
    # At 8 positions there are as many as query heads and gates together.
    model = model_of("qwen3_next", **QWEN3_NEXT)
    ids = torch.randint(3, 120, (1, positions))
    plain = values_of(model, ids, "q", "rot_q")
    assert plain["q"].shape == plain["rot_q"].shape == (1, positions, 4, 16)
    with attach_hooks(model, at_heads(ablate("q"), [1]), layers=[0]):
        edited = values_of(model, ids, "rot_q")["rot_q"]
    wanted = plain["rot_q"].clone()
    wanted[:, :, 1] = 0
    assert torch.equal(edited, wanted)


def test_queries_that_are_normalised_after_their_rotation_are_those_of_the_projection() -> None:
    model = model_of("nanochat", **NANOCHAT)
    check_hook_points(model)
    found = values_of(model, torch.full((1, 6), 7), "q", "k", "rot_q")
    for name in ("q", "k"):
        # One token everywhere: before the rotation all positions are alike, up to the rounding of the products.
        torch.testing.assert_close(found[name], found[name][:, :1].expand_as(found[name]), rtol=1e-5, atol=1e-6)
    states = model.model.layers[0].input_layernorm(model.model.norm(model.model.embed_tokens(torch.tensor([[7]]))))
    queries = model.model.layers[0].self_attn.q_proj(states).view(1, 1, 4, 16)
    torch.testing.assert_close(found["q"][:, :1], queries, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found["rot_q"][:, 0], found["rot_q"][:, 5], atol=1e-2)
