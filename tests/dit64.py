"""An independent forward pass of a DiT in float64, from a state dict, without any module of dlm_lens."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.reference import attention64, rotated


def layer_normed(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight


def gelu64(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dit64(
    model: torch.nn.Module, ids: Tensor, visible: Tensor | None = None, sigma: float = 0.0
) -> dict[str, Tensor]:
    """Patterns, residual streams and logits of one row [1, position]."""
    config: Any = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    heads, length = config.num_attention_heads, ids.shape[1]
    kept: dict[str, Tensor] = {}
    if visible is None:
        visible = torch.ones(1, 1, length, length, dtype=torch.bool)

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def vectors(name: str, count: int) -> list[Tensor]:
        if not config.adaln:
            return [torch.tensor(one).double() for one in (0, 0, 1, 0, 0, 1)][:count]
        return list(linear(condition, name).reshape(count, -1))

    if config.adaln:
        angle = [sigma * 10000 ** (-i / 128) for i in range(128)]
        waves = torch.tensor([*map(math.cos, angle), *map(math.sin, angle)], dtype=torch.float64)
        condition = silu(linear(silu(linear(waves, "model.sigma_map.fc1")), "model.sigma_map.fc2"))
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = vectors(f"{name}.modulation", 6)
        normed = layer_normed(x, weights[f"{name}.norm1.weight"]) * (1 + scale) + shift
        q, k, v = (linear(normed, f"{name}.self_attn.{one}_proj").reshape(1, length, heads, -1) for one in "qkv")
        places = torch.arange(length)[None]

        def keep(point: str, value: Tensor, layer: int = layer) -> Tensor:
            kept[f"{point}{layer}"] = value
            return value

        z = attention64(rotated(q, places, 10000.0), rotated(k, places, 10000.0), v, visible, keep)
        x = x + gate * linear(z.flatten(-2), f"{name}.self_attn.o_proj")
        normed = layer_normed(x, weights[f"{name}.norm2.weight"]) * (1 + mlp_scale) + mlp_shift
        x = x + mlp_gate * linear(gelu64(linear(normed, f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
        kept[f"resid{layer}"] = x
    last = vectors("model.norm.modulation", 2)
    x = layer_normed(x, weights["model.norm.norm_final.weight"]) * (1 + last[1]) + last[0]
    return kept | {"logits": linear(x, "lm_head"), "final_modulation": torch.stack(last)}
