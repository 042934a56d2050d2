"""An independent forward pass of ModernBERT in float64, from a state dict, without any module of transformers."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.reference import attention64, rotated


def layer_normed(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight


def gelu64(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def modernbert64(model: torch.nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Patterns and logits of one row [1, position], without padding."""
    config: Any = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    length, heads = ids.shape[1], config.num_attention_heads
    places, kept = torch.arange(length), dict[str, Tensor]()
    x = layer_normed(
        weights["model.embeddings.tok_embeddings.weight"][ids], weights["model.embeddings.norm.weight"]
    )
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        entering = x if layer == 0 else layer_normed(x, weights[f"{prefix}attn_norm.weight"])
        fused = (entering @ weights[f"{prefix}attn.Wqkv.weight"].T).view(1, length, 3, heads, -1)
        whole = config.layer_types[layer] == "full_attention"
        theta = 160000.0 if whole else 10000.0
        q, k = (rotated(fused[:, :, part], places[None], theta) for part in (0, 1))
        visible = (places[:, None] - places).abs() <= (length if whole else config.local_attention // 2)

        def keep(name: str, value: Tensor, layer: int = layer) -> Tensor:
            kept[f"{name}{layer}"] = value
            return value

        z = attention64(q, k, fused[:, :, 2], visible[None, None], keep)
        x = x + z.flatten(2) @ weights[f"{prefix}attn.Wo.weight"].T
        value, gate = (
            layer_normed(x, weights[f"{prefix}mlp_norm.weight"]) @ weights[f"{prefix}mlp.Wi.weight"].T
        ).chunk(2, -1)
        x = x + (gelu64(value) * gate) @ weights[f"{prefix}mlp.Wo.weight"].T
    x = layer_normed(x, weights["model.final_norm.weight"])
    x = layer_normed(gelu64(x @ weights["head.dense.weight"].T), weights["head.norm.weight"])
    kept["logits"] = x @ weights["decoder.weight"].T + weights["decoder.bias"]
    return kept
