"""Learned sink tokens and gated attention, as mixins in front of a transformers decoder of any family."""

from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from dlm_lens.adapters.masked_diffusion import MaskedDiffusion
from dlm_lens.adapters.spare_softmax import spare_logits, with_spare_key
from dlm_lens.attention import HookedAttention, SinkLayout, hooked_attention
from dlm_lens.attention.calls import column_calls
from dlm_lens.attention.points import Mixed


class SinkEmbedding(nn.Embedding):
    """Token embedding that returns the canvas with the learned sinks around it: `[batch, S + count, d_model]`."""

    def __init__(self, config: Any) -> None:
        rows = getattr(config, "embedding_rows", config.vocab_size)
        super().__init__(rows, config.hidden_size, config.pad_token_id)
        self.layout = SinkLayout(config.num_sinks, config.sink_placement)
        self.sinks = nn.Parameter(torch.randn(config.num_sinks, config.hidden_size) * config.initializer_range)

    def forward(self, input: Int[Tensor, "batch canvas"]) -> Float[Tensor, "batch position d_model"]:
        """Embed the canvas and put the sinks in their place."""
        sinks = self.sinks.expand(input.shape[0], -1, -1)
        return self.layout.surround(super().forward(input), sinks.to(self.weight.dtype))


class SinkAttention(HookedAttention):
    """Attention in which a sink sees only itself (Eq. 6) and everyone sees all sinks.

    A sink's z is its own value, so the fused kernel runs on the canvas's queries alone: with the row of the
    sink in it, it would need a mask, which costs more than the sink (benchmarks/README.md).
    """

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        host = cast(Any, self)
        if host.config.num_sinks and host.config.zero_sink_value:
            heads = (*hidden_states.shape[:-1], -1, host.head_dim)
            layout = SinkLayout.of(self)
            flags = layout.is_sink(heads[1], hidden_states.device)
            values = host.v_proj(hidden_states).view(heads).masked_fill(flags[:, None, None], 0.0)
            q = host.hook_q(host.q_proj(hidden_states).view(heads))
            return q, host.hook_k(host.k_proj(hidden_states).view(heads)), host.hook_v(values)
        return super()._project(hidden_states)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Bool[Tensor, "..."] | None, **kwargs: Any
    ) -> Mixed:
        layout, length = SinkLayout.of(self), q.shape[2]
        if not layout.count:
            logits = spare_logits(self)
            spare = {} if logits is None else {"spare_logits": logits}
            return super()._attend(q, k, v, attention_mask, **kwargs, **spare)
        canvas = layout.canvas(length)
        rows = attention_mask if attention_mask is None else attention_mask[:, :, canvas]
        part = (q[:, :, canvas], k, v, rows)
        if self._materialises():
            whole = layout.restrict(attention_mask, length, q.device)
            z, pattern = hooked_attention(self, q, k, v, whole, **kwargs)
            return Mixed(z, pattern, self._inputs_with(pattern[:, :, canvas], *part, canvas.start, **kwargs))
        mixed = self._mix(*part, own_start=canvas.start, **kwargs)
        own = v[:, :, layout.sinks(length)].transpose(1, 2)
        return mixed._replace(z=layout.surround(mixed.z, own.repeat_interleave(q.shape[1] // v.shape[1], 2)))

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        own_start: int | None = None,
        *,
        spare_logits: Float[Tensor, "head"] | None = None,
        **kwargs: Any,
    ) -> Mixed:
        if spare_logits is None:
            return super()._mix(q, k, v, attention_mask, own_start, **kwargs)
        learned = cast(Any, self).config.softmax == "sink_logits"
        wide = with_spare_key(q, k, v, attention_mask, spare_logits if learned else None, kwargs["scaling"])
        mixed = super()._mix(*wide, own_start, **kwargs)
        return mixed._replace(z=mixed.z[..., : v.shape[-1]])

    def _materialises(self) -> bool:
        # Streams take rows to sum to 1; with a spare entry they do not.
        host = cast(Any, self)
        streamed = self.readers or column_calls(host.hook_scores, host.hook_pattern)
        return super()._materialises() or (bool(streamed) and spare_logits(host) is not None)

    def _output(self, z: Tensor, hidden_states: Tensor) -> Tensor:
        host = cast(Any, self)
        if host.config.gated_attention:
            z = z * host.gate_proj(hidden_states).sigmoid().view(z.shape)
        return super()._output(z, hidden_states)


class SinkDecoder(nn.Module):
    """Mixin in front of a decoder: takes a canvas, and its states have S + num_sinks positions.

    `inputs_embeds`, where given, hold the sinks already, as the embedding returns them.
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
        if getattr(config, "softmax", "standard") == "sink_logits":
            for layer in model.layers:
                layer.self_attn.sink_logits = nn.Parameter(torch.zeros(config.num_attention_heads))
        model.post_init()

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
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            attention_mask = layout.widen(attention_mask)
        if position_ids is None:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None]
        output = super().forward(
            attention_mask=attention_mask,
            position_ids=layout.position_ids(position_ids),
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return output


class SinkMaskedDiffusion(MaskedDiffusion):
    """Mixin in front of a causal LM: inside are S + num_sinks positions, the logits are the canvas's."""

    attention_class = SinkAttention
