"""Mixture of experts with group-limited routing by sigmoid scores (LLaDA2, Ling 2.0), on transformers' Glm4Moe.

In LLaDA2.2 the tokens of a block choose among few experts that they share (`BlockRouter`).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeConfig,
    Glm4MoeDecoderLayer,
    Glm4MoeExperts,
    Glm4MoeMoE,
    Glm4MoeTopkRouter,
)

from dlm_lens.attention import position_ids
from dlm_lens.placement import without_autocast

ROUTER_POINTS = ("router_logits", "router_experts", "router_weights")
"""Hook points of a router in the order in which they fire; the child of `mlp.gate` is `hook_<name>`."""


class GroupLimitedRouter(Glm4MoeTopkRouter):
    """Chooses k experts for every token, in float32 at least (also under autocast), with hook points.

    s = sigmoid(W x). Experts are in `n_group` groups of equal size; the score of a group is the sum of its two
    largest s + b, where b is `e_score_correction_bias`. Among the experts of the best `topk_group` groups the k
    with the largest s + b are chosen, in falling order. Their weights are s (without b), divided by the sum of the
    k where k > 1, times `routed_scaling_factor` (ZHZisZZ/dllm, modeling_llada2_moe.py).

    `hook_router_logits` W x `[token, expert]`, `hook_router_experts` `[token, k]` and `hook_router_weights`
    `[token, k]` are identities; tokens are the positions of all rows, one row after the other. Experts that a hook
    puts in place of the chosen ones get weights by the same formula.
    """

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config)
        # In the model's dtype, as the authors' is: that of transformers 5.24 is in float32.
        self.weight = nn.Parameter(torch.zeros(self.num_experts, self.hidden_dim))
        for name in ROUTER_POINTS:
            self.add_module(f"hook_{name}", nn.Identity())

    def forward(
        self, hidden_states: Float[Tensor, "*batch d_model"]
    ) -> tuple[Float[Tensor, "token expert"], Float[Tensor, "token k"], Int[Tensor, "token k"]]:
        """Return logits, weights and chosen experts."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        # Autocast would multiply in bfloat16; the meta device has none.
        with without_autocast(tokens.device):
            logits = functional.linear(tokens, self.weight.to(tokens.dtype))
        logits = self.hook_router_logits(logits)
        scores = logits.sigmoid()
        experts = self.hook_router_experts(self._chosen(scores + self.e_score_correction_bias))
        weights = scores.gather(1, experts)
        if self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, self.hook_router_weights(weights * self.routed_scaling_factor), experts

    def _chosen(self, scores: Float[Tensor, "token expert"]) -> Int[Tensor, "token k"]:
        """The k experts with the largest scores in the best groups."""
        grouped = scores.unflatten(-1, (self.num_group, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1).topk(self.top_k, dim=-1).indices


class ExpertStack(Glm4MoeExperts):
    """The experts' matrices in stacks; sum_e w_e E_e(x) of every token, summed in the dtype of the weights w.

    With transformers' `experts_implementation` "grouped_mm" they are products of groups of tokens. In dtypes and
    sizes that torch has no such product for, and with "eager", one expert is computed after the other.
    """

    def forward(
        self,
        hidden_states: Float[Tensor, "token d_model"],
        top_k_index: Int[Tensor, "token k"],
        top_k_weights: Float[Tensor, "token k"],
    ) -> Float[Tensor, "token d_model"]:
        """Return the weighted sum of the chosen experts."""
        rows = min(self.hidden_dim, self.intermediate_dim, key=lambda size: size & -size) * hidden_states.itemsize
        known = {"grouped_mm": hidden_states.dtype != torch.float64 and rows % 16 == 0, "eager": False, None: False}
        if known.get(self.config._experts_implementation, True):
            grouped: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return grouped
        mixed = hidden_states.new_zeros(hidden_states.shape, dtype=top_k_weights.dtype)
        for expert in top_k_index.unique().tolist():
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            value = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            mixed.index_add_(0, token, value * top_k_weights[token, place, None])
        return mixed.to(hidden_states.dtype)


class GroupLimitedExperts(Glm4MoeMoE):
    """The layer's MLP: the chosen experts, weighted, plus the experts that every token passes through."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config)
        self.gate, self.experts = GroupLimitedRouter(config), ExpertStack(config)


class SplitProjections(ConversionOps):
    """The fused projection, whose rows are all queries, all keys, all values, as q, k and v."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One tensor to three."""
        config = kwargs["config"]
        (held,) = input_dict.values()
        fused = held[0] if isinstance(held, list) else held
        keys = config.num_key_value_heads * config.head_dim
        parts = fused.split([config.num_attention_heads * config.head_dim, keys, keys])
        return {name: part.contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving."""
        return FuseProjections()


class FuseProjections(ConversionOps):
    """q, k and v as the fused projection."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Three tensors to one."""
        parts = [input_dict[name] for name in source_patterns]
        return {target_patterns[0]: torch.cat([part[0] if isinstance(part, list) else part for part in parts])}

    @property
    def reverse_op(self) -> ConversionOps:
        """For loading."""
        return SplitProjections()


def fused_projections(kind: str) -> WeightConverter:
    """Conversion of the fused projection's "weight" or "bias"."""
    names = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
    return WeightConverter([f"attention.query_key_value.{kind}"], names, [SplitProjections()])


EXPERTS = (
    WeightConverter(
        ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        ["mlp.experts.gate_up_proj"],
        [MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(["mlp.experts.*.down_proj.weight"], ["mlp.experts.down_proj"], [MergeModulelist(dim=0)]),
)
"""Conversions of checkpoints that hold every expert's matrices alone to the stacks of transformers."""


class BlockRouter(GroupLimitedRouter):
    """Chooses k experts for every token among the `expert_capacity` experts of its block.

    s and b are those of `GroupLimitedRouter`, and so are weights and hook points. The score of an expert in a block
    of `block_size` tokens is the largest s + b that a token of the block gives it. The `expert_capacity` experts
    with the largest scores are the block's, and each token chooses the k with its own largest s + b among them.
    Groups are not read. (inclusionAI/LLaDA2.2-flash, `block_routing`, as FLX-OSS/FluxServe describes it.)

    Blocks are counted from each row's first token; a block at the end may be shorter, and padding is in no block of
    the text. What a token computes therefore depends on the later tokens of its block, under any attention.

    Attributes:
        blocks: of every token of the next call, `[batch, position]`; None: its tokens are one text.
    """

    blocks: Int[Tensor, "batch position"] | None = None

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config)
        self.capacity, self.block_size = int(config.expert_capacity), int(config.block_size)

    @torch.no_grad()
    def _chosen(self, scores: Float[Tensor, "token expert"]) -> Int[Tensor, "token k"]:
        """The k experts with the largest scores among those of the token's block."""
        blocks, self.blocks = self.blocks, None
        if blocks is None:
            blocks = torch.arange(len(scores), device=scores.device)[None] // self.block_size
        blocks = blocks.to(scores.device) + 1  # padding is block 0 of its row
        rows = torch.arange(len(blocks), device=scores.device)[:, None]
        number = (rows * (int(blocks.max()) + 1) + blocks).flatten()
        shared = scores.new_full((int(number.max()) + 1, scores.shape[1]), -torch.inf)
        shared = shared.scatter_reduce(0, number[:, None].expand_as(scores), scores, "amax")
        best = shared.topk(self.capacity, dim=-1).indices
        outside = torch.ones_like(shared, dtype=torch.bool).scatter_(1, best, False)
        return scores.masked_fill(outside[number], -torch.inf).topk(self.top_k, dim=-1).indices


class BlockRoutedExperts(GroupLimitedExperts):
    """The layer's MLP, whose router chooses experts block by block."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config)
        self.gate, self.experts = BlockRouter(config), ExpertStack(config)


class BlockRoutedLayer(Glm4MoeDecoderLayer):
    """A layer that takes the block of every token, for its router, if it has one.

    They are an argument of `forward`, and not kept beside the pass, so that a layer that is computed again in the
    backward pass (activation checkpointing) has those of its own pass.
    """

    def __init__(self, config: Glm4MoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp: nn.Module
        if isinstance(self.mlp, Glm4MoeMoE):
            self.mlp = BlockRoutedExperts(config)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch position d_model"],
        *args: Any,
        routing_blocks: Int[Tensor, "batch position"] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "batch position d_model"]:
        """The states after the layer; other arguments are those of transformers' own."""
        if isinstance(self.mlp, BlockRoutedExperts):
            self.mlp.gate.blocks = routing_blocks
        made: Tensor = super().forward(hidden_states, *args, **kwargs)
        return made


def blocks_of_pass(
    length: int,
    positions: Int[Tensor, "#batch position"] | None,
    attention_mask: Any,
    shape: tuple[int, ...],
    cached: int,
) -> Int[Tensor, "batch position"]:
    """The block of every token of a pass, counted from its row's first token; -1 for padding.

    Args:
        length: tokens of a block.
        positions: of every token, counted from its row's first; where several at the front are 0, all but the last
            are padding. None: from `attention_mask`.
        attention_mask: of transformers; one of `[batch, key]` says what is padding, others are not read.
        shape: (rows, tokens) of the pass.
        cached: tokens before the pass, whose keys are kept.

    Raises:
        ValueError: a pass that begins inside a block, since the tokens before it in the block would have no say.
    """
    flat = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    content: Bool[Tensor, "#batch position"]
    if flat:
        known = attention_mask.bool()
        counted, content = position_ids(known)[:, -shape[1] :], known[:, -shape[1] :]
        positions = counted if positions is None else positions
    elif positions is None:
        positions = torch.arange(cached, cached + shape[1])[None]
        content = torch.ones_like(positions, dtype=torch.bool)
    else:
        following = torch.nn.functional.pad(positions[:, 1:], (0, 1), value=1)
        content = (positions != 0) | (following != 0)
    begins = torch.where(content, positions, length).amin(-1) if cached else positions.new_zeros(1)
    if bool((begins % length).any()):
        raise ValueError(
            f"this model's router chooses experts for blocks of {length} tokens, and a pass with {cached} cached "
            f"tokens begins at token {int(begins[begins % length > 0][0])}, inside one; compute whole blocks, or "
            "everything (use_cache=False)"
        )
    return positions.div(length, rounding_mode="floor").masked_fill(~content, -1).expand(shape)
