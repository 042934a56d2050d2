"""An independent forward pass in float64, straight from a state dict, with an edit at every hook point.

Written from the formulas, with loops over heads and without any module of transformers or dlm_lens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Edit = Callable[[Tensor], Tensor]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate [batch, position, head, d_head] by position * theta^(-2i/h), halves paired."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].double() * theta ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attention64(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, edit: Callable[[str, Tensor], Tensor]) -> Tensor:
    """z [batch, position, head, d_head] of rotated q, k and v in that layout."""
    groups = q.shape[2] // k.shape[2]
    scores = torch.stack(
        [q[:, :, h] @ k[:, :, h // groups].transpose(1, 2) / q.shape[-1] ** 0.5 for h in range(q.shape[2])], 1
    )
    scores = edit("scores", torch.where(visible, scores, torch.finfo(torch.float32).min))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    pattern = weights / weights.sum(-1, keepdim=True) * visible.any(-1, keepdim=True)
    pattern = edit("pattern", pattern)
    return torch.stack([pattern[:, h] @ v[:, :, h // groups] for h in range(q.shape[2])], 2)


def forward64(
    model: torch.nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    edits: Mapping[tuple[int, str], Edit] | None = None,
    positions: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every intermediate of a Llama or Qwen2 network under its hook point's name, and the logits."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    kept: dict[str, Tensor] = {}
    batch, length = ids.shape
    visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask.bool()[:, None, None, :]
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    if positions is None:
        positions = torch.arange(length)[None]
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."

        def edit(name: str, value: Tensor, layer: int = layer) -> Tensor:
            value = (edits or {}).get((layer, name), lambda same: same)(value)
            kept[f"{name}{layer}"] = value
            return value

        def linear(name: str, x: Tensor, prefix: str = prefix) -> Tensor:
            bias = weights.get(f"{prefix}{name}.bias")
            return x @ weights[f"{prefix}{name}.weight"].T + (0 if bias is None else bias)

        x = normed(hidden, weights[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            edit(
                name,
                linear(f"self_attn.{name}_proj", x).reshape(
                    batch, length, heads, config.hidden_size // config.num_attention_heads
                ),
            )
            for name, heads in (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
                ("v", config.num_key_value_heads),
            )
        )
        theta = config.rope_parameters["rope_theta"]
        q, k = edit("rot_q", rotated(q, positions, theta)), edit("rot_k", rotated(k, positions, theta))
        z = edit("z", attention64(q, k, v, visible, edit))
        hidden = hidden + linear("self_attn.o_proj", z.flatten(-2))
        x = normed(hidden, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = linear("mlp.gate_proj", x)
        hidden = hidden + linear("mlp.down_proj", gate * torch.sigmoid(gate) * linear("mlp.up_proj", x))
        kept[f"resid{layer}"] = hidden
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    kept["logits"] = normed(hidden, weights["model.norm.weight"], config.rms_norm_eps) @ head.T
    return kept
