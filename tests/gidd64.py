"""GIDD's network in float64, from the weights and the formulas, without any module of transformers or dlm_lens."""

from typing import Any

import torch
from torch import Tensor


def network64(model: Any, canvas: Tensor, clean: int) -> dict[str, Tensor]:
    """Logits and patterns of one canvas in float64, from the weights, with the learned key as last column.

    Positions before `clean` see such positions alone, and the learned key.
    """
    w, c = {name: value.double() for name, value in model.state_dict().items()}, model.config
    heads, length, found = c.num_attention_heads, len(canvas), {}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt() * (1 + w[f"{name}.weight"])

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(length).double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w["model.embed_tokens.weight"][canvas]
    hidden = (torch.arange(length)[:, None] < clean) & (torch.arange(length) >= clean)
    for layer in range(c.num_hidden_layers):
        p, scale = f"model.layers.{layer}", c.resid_scale / c.num_hidden_layers
        h = norm(x, f"{p}.attn_layernorm")
        q, k, v = (h @ w[f"{p}.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k = norm(q, f"{p}.self_attn.q_norm"), norm(k, f"{p}.self_attn.k_norm")
        q, k, v = (part.view(length, heads, -1) for part in (q, k, v))
        q, k = turned(q), turned(k)
        if c.attention_bias:
            k = torch.cat([k, w[f"{p}.self_attn.k_norm.k_bias"][None]])
            v = torch.cat([v, w[f"{p}.self_attn.v_bias"][None]])
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        scores = c.attn_soft_cap * torch.tanh(scores / c.attn_soft_cap)
        scores[:, :, :length] = scores[:, :, :length].masked_fill(hidden, -torch.inf)
        found[f"pattern{layer}"] = pattern = scores.softmax(-1)
        z = torch.einsum("hij,jhd->ihd", pattern, v).flatten(1)
        x = x + scale * (z @ w[f"{p}.self_attn.o_proj.weight"].T)
        up = norm(x, f"{p}.mlp_layernorm") @ w[f"{p}.mlp.up_proj.weight"].T + w[f"{p}.mlp.up_proj.bias"]
        x = x + scale * (up.clamp(min=0) ** 2 @ w[f"{p}.mlp.down_proj.weight"].T + w[f"{p}.mlp.down_proj.bias"])
    found["logits"] = norm(x, "model.norm") @ w["lm_head.weight"].T * c.head_scaling
    return found
