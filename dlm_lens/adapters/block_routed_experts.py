"""Mixture of experts in which the tokens of a block choose among few experts that they share (LLaDA2.2)."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeDecoderLayer, Glm4MoeMoE

from dlm_lens.adapters.group_limited_experts import ExpertStack, GroupLimitedExperts, GroupLimitedRouter
from dlm_lens.attention import position_ids


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
