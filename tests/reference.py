"""An independent forward pass in float64, straight from a state dict, with an edit at every hook point.

Written from the formulas, with loops over heads and without any module of transformers or dlm_lens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Edit = Callable[[Tensor], Tensor]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies64(rotation: float | Mapping[str, Any], half: int) -> Tensor:
    """theta^(-2i/h) for i < h/2; in YaRN (2309.00071, section 3.2) the slow ones are divided by the factor."""
    theta = float(rotation["rope_theta"]) if isinstance(rotation, Mapping) else rotation
    plain = theta ** (-torch.arange(half).double() / half)
    if not isinstance(rotation, Mapping) or rotation.get("rope_type", "default") != "yarn":
        return plain
    assert rotation["mscale"] == rotation["mscale_all_dim"]  # no temperature of the attention
    longest, found = rotation["original_max_position_embeddings"], []

    def place(turns: float) -> float:
        return half * math.log(longest / (turns * 2 * math.pi)) / math.log(theta)

    low, high = math.floor(place(rotation["beta_fast"])), math.ceil(place(rotation["beta_slow"]))
    low, high = max(low, 0), min(high, 2 * half - 1)
    for i, frequency in enumerate(plain.tolist()):
        slow = min(1.0, max(0.0, (i - low) / (high - low if high > low else 0.001)))
        found.append(frequency / rotation["factor"] * slow + frequency * (1 - slow))
    return torch.tensor(found, dtype=torch.float64)


def rotated(
    x: Tensor, positions: Tensor, rotation: float | Mapping[str, Any], rounded: bool = False, part: float = 1.0
) -> Tensor:
    """Rotate [batch, position, head, d_head] by position * frequency, halves paired; SMDM rounds the tables.

    LLaDA2 rotates the first `part` of the coordinates only, which h then is.
    """
    x, rest = x.split([int(part * x.shape[-1]), x.shape[-1] - int(part * x.shape[-1])], -1)
    half = x.shape[-1] // 2
    angle = positions[..., None, None].double() * frequencies64(rotation, half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    if rounded:
        cos, sin = cos.bfloat16().double(), sin.bfloat16().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def scaled64(config: Any, q: Tensor, positions: Tensor) -> Tensor:
    """Ministral 3's queries times 1 + beta ln(1 + floor(i / n)); those of others as they are."""
    beta = config.rope_parameters.get("llama_4_scaling_beta")
    if beta is None:
        return q
    turns = torch.floor(positions.double() / config.rope_parameters["original_max_position_embeddings"])
    return q * (1 + beta * torch.log(1 + turns))[..., None, None]


def gated64(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x)."""
    value = x @ gate.T
    return (value * torch.sigmoid(value) * (x @ up.T)) @ down.T


def shared64(config: Any, logits: Tensor, bias: Tensor) -> list[list[int]]:
    """The experts among which each token of one row may choose in LLaDA2.2, those of its block."""
    found: list[list[int]] = []
    for start in range(0, len(logits), config.block_size):
        block = [
            [1 / (1 + math.exp(-float(one))) for one in token] for token in logits[start:][: config.block_size]
        ]
        best = [max(token[expert] for token in block) + float(bias[expert]) for expert in range(len(bias))]
        order = sorted(range(len(best)), key=lambda expert: -best[expert])[: config.expert_capacity]
        found += [order] * len(block)
    return found


def routed64(
    config: Any, logits: Tensor, bias: Tensor, allowed: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """Chosen experts of one token, best first, and their weights, entry by entry."""
    scores = [1 / (1 + 2.718281828459045 ** -float(one)) for one in logits]
    ranked = [score + float(b) for score, b in zip(scores, bias, strict=True)]
    if allowed is None:
        size = len(ranked) // config.n_group
        groups = [range(size * group, size * (group + 1)) for group in range(config.n_group)]
        groups.sort(key=lambda group: -sum(sorted(ranked[one] for one in group)[-2:]))
        allowed = [one for group in groups[: config.topk_group] for one in group]
    chosen = sorted(allowed, key=lambda one: -ranked[one])[: config.num_experts_per_tok]
    total = sum(scores[one] for one in chosen) if len(chosen) > 1 else 1.0
    return chosen, [scores[one] / total * config.routed_scaling_factor for one in chosen]


def experts64(config: Any, weights: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """The mixture of experts of LLaDA2, LLaDA-MoE or RND1, token by token."""
    shared = [weights.get(f"{prefix}shared_experts.{name}_proj.weight") for name in ("gate", "up", "down")]
    stacks = weights[f"{prefix}experts.gate_up_proj"], weights[f"{prefix}experts.down_proj"]
    found, bias = [], weights.get(f"{prefix}gate.e_score_correction_bias")
    allowed: list[list[int] | None] = [None] * (x.shape[0] * x.shape[1])
    if getattr(config, "expert_capacity", None):
        gates = x @ weights[f"{prefix}gate.weight"].T
        allowed = [one for row in gates for one in shared64(config, row, bias)]
    for token, among in zip(x.flatten(0, 1), allowed, strict=True):
        logits = weights[f"{prefix}gate.weight"] @ token
        if bias is not None:
            chosen = routed64(config, logits, bias, among)
        else:  # the k largest of a softmax: of LLaDA-MoE as they are, of RND1 divided by their sum
            likely = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
            best = sorted(range(len(likely)), key=lambda expert: -float(likely[expert]))[
                : config.num_experts_per_tok
            ]
            kept = likely[best].sum() if getattr(config, "norm_topk_prob", False) else 1.0
            chosen = best, [likely[expert] / kept for expert in best]
        value = torch.zeros_like(token) if shared[0] is None else gated64(token, *shared)
        for expert, weight in zip(*chosen, strict=True):
            gate, up = stacks[0][expert].chunk(2)
            value = value + weight * gated64(token, gate, up, stacks[1][expert])
        found.append(value)
    return torch.stack(found).view_as(x)


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    edit: Callable[[str, Tensor], Tensor],
    spare: Tensor | None = None,
) -> Tensor:
    """z [batch, position, head, d_head] of rotated q, k and v in that layout; `spare` is b of every head."""
    groups = q.shape[2] // k.shape[2]
    scores = torch.stack(
        [q[:, :, h] @ k[:, :, h // groups].transpose(1, 2) / q.shape[-1] ** 0.5 for h in range(q.shape[2])], 1
    )
    scores = edit("scores", torch.where(visible, scores, torch.finfo(torch.float32).min))
    pattern = edit("pattern", softmax64(scores, spare) * visible.any(-1, keepdim=True))
    return torch.stack([pattern[:, h] @ v[:, :, h // groups] for h in range(q.shape[2])], 2)


def softmax64(scores: Tensor, spare: Tensor | None = None) -> Tensor:
    """exp(s) / (exp(b) + sum exp(s)) of [batch, head, query, key], without the exp(b) where there is no spare."""
    top = scores.amax(-1, keepdim=True)
    if spare is not None:
        top = top.maximum(spare[:, None, None])
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    return weights / (total if spare is None else total + torch.exp(spare[:, None, None] - top))


def spare64(config: Any, weights: Mapping[str, Tensor], layer: int) -> Tensor | None:
    """b of every head: zeros for off-by-one, learned for sink logits, None for the standard softmax."""
    name = getattr(config, "softmax", "standard")
    if name == "sink_logits":
        return weights[f"model.layers.{layer}.self_attn.sink_logits"]
    return torch.zeros(config.num_attention_heads).double() if name == "off_by_one" else None


def with_sinks(
    hidden: Tensor, visible: Tensor, positions: Tensor, sinks: Tensor, config: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Canvas states, visibility and positions with the learned sinks, row by row and token by token."""
    batch, length, _ = hidden.shape
    count, front = len(sinks), config.sink_placement == "front"
    states, places = [], []
    allowed = torch.zeros(batch, 1, length + count, length + count, dtype=torch.bool)
    for row in range(batch):
        where = positions[row % len(positions)]
        own = [sinks[i] for i in range(count)]
        tokens = [hidden[row, i] for i in range(length)]
        states.append(torch.stack(own + tokens if front else tokens + own))
        after = [int(where.max()) + 1 + i for i in range(count)]
        shifted = [int(p) + count for p in where]
        places.append(list(range(count)) + shifted if front else where.tolist() + after)
        offset, first = (count, 0) if front else (0, length)
        allowed[row, 0, offset : offset + length, offset : offset + length] = visible[row, 0]
        allowed[row, 0, offset : offset + length, first : first + count] = True
        for i in range(count):
            allowed[row, 0, first + i, first + i] = True
    return torch.stack(states), allowed, torch.tensor(places)


def forward64(
    model: torch.nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    edits: Mapping[tuple[int, str], Edit] | None = None,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every intermediate of a Llama, Qwen2, Qwen3, LLaDA2, LLaDA-MoE or GPT-2 by hook point's name; the logits."""
    config = model.config
    if hasattr(config, "n_inner"):
        return gpt64(model, ids, mask, causal=causal, edits=edits, positions=positions, visible=visible)
    weights = {name: value.double() for name, value in model.state_dict().items()}
    kept: dict[str, Tensor] = {}
    batch, length = ids.shape
    if visible is None:
        visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask.bool()[:, None, None, :]
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    if positions is None:
        positions = torch.arange(length)[None]
        if mask is not None and getattr(config, "num_sinks", 0):
            # The distance to a sink counts from the row's own first token.
            positions = torch.tensor([[max(0, int(row[: i + 1].sum()) - 1) for i in range(length)] for row in mask])
    hidden = weights["model.embed_tokens.weight"][ids]
    sinks = getattr(config, "num_sinks", 0)
    if sinks:
        hidden, visible, positions = with_sinks(
            hidden, visible, positions, weights["model.embed_tokens.sinks"], config
        )
        length += sinks
    at_sink = torch.zeros(length, dtype=torch.bool)
    at_sink[
        slice(0, sinks) if getattr(config, "sink_placement", "front") == "front" else slice(length - sinks, None)
    ] = True
    kept["resid-1"] = hidden
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
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        groups = config.num_key_value_heads
        q = edit("q", linear("self_attn.q_proj", x).reshape(batch, length, -1, width))
        k = edit("k", linear("self_attn.k_proj", x).reshape(batch, length, groups, width))
        v = linear("self_attn.v_proj", x).reshape(batch, length, groups, width)
        if getattr(config, "zero_sink_value", False):
            v = torch.where(at_sink[:, None, None], torch.zeros_like(v), v)
        v = edit("v", v)
        part = config.rope_parameters.get("partial_rotary_factor", 1.0)
        turn = (positions, config.rope_parameters, config.model_type == "smdm", part)
        if f"{prefix}self_attn.q_norm.weight" in weights:
            q, k = (
                normed(one, weights[f"{prefix}self_attn.{name}_norm.weight"], config.rms_norm_eps)
                for name, one in (("q", q), ("k", k))
            )
        q, k = edit("rot_q", scaled64(config, rotated(q, *turn), positions)), edit("rot_k", rotated(k, *turn))
        z = edit("z", attention64(q, k, v, visible, edit, spare64(config, weights, layer)))
        if getattr(config, "gated_attention", False):
            z = z.flatten(-2) / (1 + torch.exp(-linear("self_attn.gate_proj", x)))
        hidden = hidden + edit("attn_out", linear("self_attn.o_proj", z.reshape(batch, length, -1)))
        x = normed(hidden, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
        if f"{prefix}mlp.gate.weight" in weights:
            mlp = experts64(config, weights, f"{prefix}mlp.", x)
        else:
            mlp = gated64(x, *(weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
        hidden = edit("resid", hidden + edit("mlp_out", mlp))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    kept["logits"] = (normed(hidden, weights["model.norm.weight"], config.rms_norm_eps) @ head.T)[:, ~at_sink]
    return kept


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + bias


def gpt64(
    model: torch.nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    edits: Mapping[tuple[int, str], Edit] | None = None,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
) -> dict[str, Tensor]:
    """The same of a GPT-2: learned positions, layer norms, one projection for q, k and v, gelu with tanh."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    kept: dict[str, Tensor] = {}
    batch, length = ids.shape
    if visible is None:
        visible = torch.ones(batch, 1, length, length, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask.bool()[:, None, None, :]
    if causal:
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
    places = torch.arange(length)[None] if positions is None else positions
    hidden = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][places]
    kept["resid-1"] = hidden
    for layer in range(config.num_hidden_layers):
        prefix = f"transformer.h.{layer}."

        def edit(name: str, value: Tensor, layer: int = layer) -> Tensor:
            value = (edits or {}).get((layer, name), lambda same: same)(value)
            kept[f"{name}{layer}"] = value
            return value

        def linear(name: str, x: Tensor, prefix: str = prefix) -> Tensor:
            return x @ weights[f"{prefix}{name}.weight"] + weights[f"{prefix}{name}.bias"]

        def norm(name: str, x: Tensor, prefix: str = prefix) -> Tensor:
            return layer_normed(
                x, weights[f"{prefix}{name}.weight"], weights[f"{prefix}{name}.bias"], config.layer_norm_epsilon
            )

        fused = linear("attn.c_attn", norm("ln_1", hidden)).view(batch, length, 3, config.num_attention_heads, -1)
        q, k, v = (edit(name, fused[:, :, index]) for index, name in enumerate("qkv"))
        q, k = edit("rot_q", q), edit("rot_k", k)
        z = edit("z", attention64(q, k, v, visible, edit))
        hidden = hidden + edit("attn_out", linear("attn.c_proj", z.reshape(batch, length, -1)))
        inner = linear("mlp.c_fc", norm("ln_2", hidden))
        inner = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        hidden = edit("resid", hidden + edit("mlp_out", linear("mlp.c_proj", inner)))
    final = [weights[f"transformer.ln_f.{name}"] for name in ("weight", "bias")]
    kept["logits"] = layer_normed(hidden, *final, config.layer_norm_epsilon) @ weights["lm_head.weight"].T
    return kept
