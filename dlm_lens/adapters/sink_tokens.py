"""Learned sink tokens and gated attention: config fields, and mixins for any transformers decoder."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionMixin
from dlm_lens.attention import Placement, SinkLayout
from dlm_lens.attention.left_padding import position_ids as padded_positions
from dlm_lens.attention.softmax_variants import Softmax, check_softmax


@dataclass(kw_only=True)
class SinkFields:
    """Mixin before a config of transformers.

    Args:
        num_sinks: learned sink tokens around the canvas (the paper: 0, 1, 2, 4).
        sink_placement: "front" (Eq. 5) or "end" (Eq. 7).
        zero_sink_value: force the sinks' values to zero in every layer (Table 5).
        gated_attention: z times sigmoid(W_g x), elementwise, before the output projection (appendix A.2).
        softmax: "standard"; "off_by_one", rows of exp(s) / (1 + sum exp(s)); "sink_logits", the 1 replaced by a
            learned exp(b) per head.
        logit_shift: position i is predicted by the output at i - 1, for models that began autoregressive.
        sampler: "llada" or "dream"; None for LLaDA's.
        sampler_defaults: settings of `denoise` that are stored in the checkpoint.

    Raises:
        ValueError: a negative number of sinks, an unknown placement, or another softmax or sliding windows beside
            sinks.
    """

    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    num_sinks: int = 0
    sink_placement: Placement = "front"
    zero_sink_value: bool = False
    gated_attention: bool = False
    softmax: Softmax = "standard"
    logit_shift: bool = False
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Switch the cache off: every step sees the whole canvas anew."""
        SinkLayout(self.num_sinks, self.sink_placement)
        check_softmax(self.softmax, self.num_sinks)
        super().__post_init__(**without_foreign_fields(kwargs))  # type: ignore[misc]
        self.use_cache = False
        if self.num_sinks and "sliding_attention" in (getattr(self, "layer_types", None) or ()):
            raise ValueError(
                f"num_sinks is {self.num_sinks}, and layers have a sliding window, outside of which no query would "
                "see a sink token (every one does, 2601.19657, Eq. 6); set use_sliding_window=False, or num_sinks=0"
            )


class SinkEmbedding(nn.Embedding):
    """Token embedding that returns the canvas with the learned sinks around it: `[batch, S + count, d_model]`."""

    def __init__(self, config: Any) -> None:
        rows = getattr(config, "embedding_rows", config.vocab_size)
        super().__init__(rows, config.hidden_size, config.pad_token_id)
        self.layout = SinkLayout(config.num_sinks, config.sink_placement)
        self.sinks = nn.Parameter(torch.empty(config.num_sinks, config.hidden_size))

    def forward(self, input: Int[Tensor, "batch canvas"]) -> Float[Tensor, "batch position d_model"]:
        """Embed the canvas and put the sinks in their place."""
        sinks = self.sinks.expand(input.shape[0], -1, -1)
        return self.layout.surround(super().forward(input), sinks.to(self.weight.dtype))


class _GatedAttention(nn.Module):
    """Mixin before a host's attention: passes the gate before its sigmoid to the attention function."""

    def forward(self, hidden_states: Float[Tensor, "batch position d_model"], *inputs: Any, **options: Any) -> Any:
        """As the host's."""
        gate = cast(Any, self).gate_proj(hidden_states)
        return super().forward(hidden_states, *inputs, **options, gate=gate)


class GatedLlamaAttention(_GatedAttention, LlamaAttention):
    """Llama's attention with a gate."""


class GatedQwen2Attention(_GatedAttention, Qwen2Attention):
    """Qwen2's attention with a gate."""


GATED: dict[type[nn.Module], type[nn.Module]] = {
    LlamaAttention: GatedLlamaAttention,
    Qwen2Attention: GatedQwen2Attention,
}


class SinkDecoder(nn.Module):
    """Mixin before a decoder: takes a canvas, and its states have S + num_sinks positions.

    `inputs_embeds`, where given, already hold the sinks, as the embedding returns them.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        model = cast(Any, self)
        rows = getattr(config, "embedding_rows", config.vocab_size)
        if config.num_sinks:
            model.embed_tokens = SinkEmbedding(config)
        elif rows != config.vocab_size:
            model.embed_tokens = nn.Embedding(rows, config.hidden_size, config.pad_token_id)
        if config.gated_attention:
            for layer in model.layers:
                width = config.num_attention_heads * layer.self_attn.head_dim
                layer.self_attn.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
                layer.self_attn.__class__ = GATED[type(layer.self_attn)]
        if getattr(config, "softmax", "standard") == "sink_logits":
            for layer in model.layers:
                layer.self_attn.sink_logits = nn.Parameter(torch.zeros(config.num_attention_heads))
        model.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise our parameters, then the host's, for `post_init` and checkpoints that lack them."""
        if isinstance(module, SinkEmbedding):
            initialization.normal_(module.sinks, std=cast(Any, self).config.initializer_range)
        if (learned := module._parameters.get("sink_logits")) is not None:
            initialization.zeros_(learned)
        cast(Any, super())._init_weights(module)

    def forward(
        self,
        input_ids: Int[Tensor, "batch canvas"] | None = None,
        attention_mask: Int[Tensor, "batch canvas"] | Bool[Tensor, "batch 1 canvas canvas"] | None = None,
        position_ids: Int[Tensor, "batch canvas"] | None = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """States of the canvas and its sinks; masks and positions are the canvas's.

        Raises:
            ValueError: both or neither of ids and embeddings, or a mask of another length.
        """
        layout = SinkLayout.of(self)
        if not layout.count:
            output: BaseModelOutputWithPast = super().forward(
                input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs
            )
            return output
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds (with the sinks in them)")
        if inputs_embeds is None:
            inputs_embeds = cast(Tensor, cast(Any, self).embed_tokens(input_ids))
        batch, length = inputs_embeds.shape[0], inputs_embeds.shape[1] - layout.count
        if attention_mask is not None:
            if attention_mask.shape[-1] != length or attention_mask.ndim not in (2, 4):
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)}; the canvas is [{batch}, {length}]"
                )
            if position_ids is None and attention_mask.ndim == 2:
                position_ids = padded_positions(attention_mask)
            attention_mask = layout.widen(attention_mask)
        if position_ids is None:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None]
        output = super().forward(
            attention_mask=attention_mask,
            position_ids=self.network_positions(layout, position_ids),
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return output

    def network_positions(
        self, layout: SinkLayout, canvas: Int[Tensor, "#batch canvas"]
    ) -> Int[Tensor, "#batch position"]:
        """Rotary positions of canvas and sinks, from those of the canvas."""
        return layout.position_ids(canvas)


class SinkMaskedDiffusion(MaskedDiffusionMixin):
    """Mixin before a causal LM: inside are S + num_sinks positions, the logits are the canvas's."""
