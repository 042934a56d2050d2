"""`CanvasModel`: DiffusionGemma's encoder and decoder as one pass over token ids, prompt and canvas."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import (
    DiffusionGemmaModel,
    DiffusionGemmaModelOutputWithPast,
    DiffusionGemmaTextRouter,
)

from dlm_lens.attention import additive_mask, position_ids
from dlm_lens.attention.cache_argument import CURRENT, NEW

IMAGES = ("pixel_values", "image_position_ids", "mm_token_type_ids")
"""What transformers' processor returns beside ids for a prompt with images."""

ROUTER_POINTS = ("router_logits", "router_probabilities", "router_experts", "router_weights")
"""Hook points of a router in the order in which they fire; the child of `router` is `hook_<name>`."""


class HookedRouter(DiffusionGemmaTextRouter):
    """DiffusionGemma's router, with hook points.

    p = softmax(W (s d^-1/2 x / rms(x))) in float32; the k experts with the largest p are chosen, and weighted by
    g_e p_e / sum of the k, where g is `per_expert_scale` (transformers, modeling_diffusion_gemma.py).

    `hook_router_logits` and `hook_router_probabilities` `[token, expert]`, `hook_router_experts` and
    `hook_router_weights` `[token, k]` are identities; tokens are the positions of all rows, one row after another.
    Experts that a hook puts in place of the chosen ones get weights by the same formula.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in ROUTER_POINTS:
            self.add_module(f"hook_{name}", nn.Identity())

    def forward(
        self, hidden_states: Float[Tensor, "token d_model"]
    ) -> tuple[Float[Tensor, "token expert"], Float[Tensor, "token k"], Int[Tensor, "token k"]]:
        """Return probabilities, weights and chosen experts."""
        scaled = self.norm(hidden_states) * self.scale * self.scalar_root_size
        logits = self.hook_router_logits(self.proj(scaled))
        probabilities = self.hook_router_probabilities(functional.softmax(logits, dim=-1, dtype=torch.float32))
        experts = self.hook_router_experts(probabilities.topk(self.config.top_k_experts, dim=-1).indices)
        chosen = probabilities.gather(-1, experts)
        weights = chosen / chosen.sum(-1, keepdim=True) * self.per_expert_scale[experts]
        return probabilities, self.hook_router_weights(weights), experts


class CanvasModel(DiffusionGemmaModel):
    """DiffusionGemma without its head, which also runs on the ids of prompt and canvas in one call.

    Called with `input_ids` alone, the last `config.canvas_length` positions (or those from `canvas_start` on) are
    the canvas, and all before them go through the encoder, at least one token. Called as transformers' own code
    calls it (`decoder_input_ids`, or an encoder's cache), it is transformers' own.

    With `pixel_values` (and the other fields of transformers' processor) the prompt's image tokens are replaced by
    the vision tower's features, as in transformers' `generate`.

    The encoder's cache keeps the keys of every position in every layer; masks hide those that a sliding layer does
    not see. So a layer's keys are the positions of prompt and canvas.

    `hook_self_conditioning` receives the logits `[batch, canvas, d_vocab]` that the decoder is conditioned on,
    where there are any (from a canvas's second step on).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for stack in (self.encoder.language_model, self.decoder):
            for layer in stack.layers:
                layer.router = HookedRouter(config.text_config)
        self.hook_self_conditioning = nn.Identity()
        self.post_init()

    @property
    def layers(self) -> Any:
        """The decoder's layers."""
        return self.decoder.layers

    @property
    def norm(self) -> Any:
        """The decoder's last norm."""
        return self.decoder.norm

    def canvas_span(self, positions: int, start: int | None = None) -> tuple[int, int]:
        """The canvas among so many positions, (start, stop).

        Raises:
            ValueError: no position is left for the encoder, or none for the canvas.
        """
        given = max(1, positions - self.config.canvas_length) if start is None else start
        if not 1 <= given < positions:
            what = f"canvas_start {start}" if start is not None else "the whole of it as the canvas"
            raise ValueError(
                f"{positions} positions with {what}: the encoder needs at least one token before the canvas, such "
                "as the prompt's first, and the canvas at least one"
            )
        return given, positions

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        decoder_input_ids: Int[Tensor, "batch canvas"] | None = None,
        self_conditioning_logits: Float[Tensor, "batch canvas d_vocab"] | None = None,
        canvas_start: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """States of the canvas after the last norm, `[batch, canvas, d_model]`.

        With a cache from `new_cache`, whose keys are those of the first positions, the encoder computes the rest
        of the prompt alone.

        Args:
            input_ids: prompt and canvas.
            attention_mask: `[batch, position]`, 0 at the padding on the left.
            past_key_values: the encoder's keys and values of the first positions.
            position_ids: of every position; None counts the content.
            decoder_input_ids: the canvas, as transformers' own code passes it.
            self_conditioning_logits: of the step before.
            canvas_start: where the canvas begins.
            **kwargs: of transformers' own model; `pixel_values`, `image_position_ids` and `mm_token_type_ids` for a
                prompt with images.

        Raises:
            ValueError: as `canvas_span`, images beside a cache that holds positions already, a mask that is not
                `[batch, position]`, or an embedding that is offloaded.
        """
        shapes_alone = any(ids is not None and ids.is_meta for ids in (input_ids, decoder_input_ids))
        if self.decoder.embed_tokens.weight.is_meta and not shapes_alone:
            raise ValueError(
                "the decoder's embedding is offloaded, and self-conditioning reads its numbers: give a device_map "
                "that keeps the weights on devices, or a quantization_config"
            )
        if self_conditioning_logits is not None:
            self_conditioning_logits = self.hook_self_conditioning(self_conditioning_logits)
        past_key_values = kwargs.pop(NEW, past_key_values)
        if input_ids is None or decoder_input_ids is not None:
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                **{CURRENT: past_key_values},
                position_ids=position_ids,
                decoder_input_ids=decoder_input_ids,
                self_conditioning_logits=self_conditioning_logits,
                **kwargs,
            )
        if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2):
            raise ValueError("prompt and canvas in one call take an attention_mask of [batch, position]")
        kwargs.pop("use_cache", None)
        images = {name: kwargs.pop(name) for name in IMAGES if kwargs.get(name) is not None}
        content = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        start, _ = self.canvas_span(input_ids.shape[1], canvas_start)
        cache = new_cache() if past_key_values is None else past_key_values
        encoded = self.encode(input_ids, content, position_ids, cache, start, images)
        where = _positions(content, position_ids)[:, start:]
        decoded = self.decoder(
            decoder_input_ids=input_ids[:, start:],
            **{CURRENT: cache},
            self_conditioning_logits=self_conditioning_logits,
            decoder_attention_mask=self.decoder_masks(content, start),
            decoder_position_ids=where,
            **{**kwargs, "query_start": start},
        )
        return DiffusionGemmaModelOutputWithPast(
            last_hidden_state=decoded.last_hidden_state,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
            **{CURRENT: cache},
            encoder_last_hidden_state=encoded,
        )

    def encode(
        self,
        input_ids: Int[Tensor, "batch position"],
        content: Bool[Tensor, "batch position"],
        position_ids: Int[Tensor, "#batch position"] | None,
        cache: Any,
        stop: int,
        images: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "batch new d_model"] | None:
        """Add the positions before `stop` that the cache lacks to it; the encoder's states of them, if any."""
        done = cache.get_seq_length()
        if images and done:
            raise ValueError("images beside a cache: they are read with the whole prompt, so give an empty cache")
        if done >= stop:
            return None
        stack: Any = self.encoder.language_model
        stack.pass_span = done, stop  # hooks in the encoder read where its queries are
        where = _positions(content, position_ids)[:, done:stop]
        mask: Any = None if _is_whole(content) else content[:, :stop]
        seen = dict(images or {})
        if (kinds := seen.pop("mm_token_type_ids", None)) is not None:
            # As transformers' `generate` builds them: tokens of one image see each other.
            mask = self.encoder.create_masks_for_generate(
                config=self.config,
                inputs_embeds=torch.empty(len(input_ids), stop, 0, dtype=self.dtype, device=input_ids.device),
                attention_mask=content[:, :stop],
                **{CURRENT: cache},
                position_ids=where,
                mm_token_type_ids=kinds[:, :stop],
            )
        states: Tensor = self.encoder(
            input_ids=input_ids[:, done:stop],
            attention_mask=mask,
            position_ids=where,
            **{CURRENT: cache},
            **seen,
        ).last_hidden_state
        return states

    def decoder_masks(self, content: Bool[Tensor, "batch position"], start: int) -> dict[str, Tensor | None]:
        """Which keys the canvas sees, by the kind of a layer: None for all.

        Every position of the canvas sees the whole canvas and, of the encoder's keys, all content; in sliding
        layers the last window - 1 positions alone, which are those that transformers' cache keeps.
        """
        text, canvas = self.config.text_config, content.shape[1] - start
        masks: dict[str, Tensor | None] = {}
        for kind, window in (("full_attention", None), ("sliding_attention", text.sliding_window)):
            visible, outside = content.clone(), 0 if window is None else max(0, start - (window - 1))
            visible[:, :outside] = False
            masks[kind] = None if not outside and _is_whole(content) else _additive(visible, canvas, self.dtype)
        return masks


def _is_whole(content: Bool[Tensor, "batch position"]) -> bool:
    """Whether no row has padding; a pass of shapes alone (`lm.scan`, the meta device) is one without."""
    return content.is_meta or detect_fake_mode(content) is not None or bool(content.all())


def new_cache() -> DynamicCache:
    """An empty cache that keeps the keys and values of every position in every layer."""
    return DynamicCache()


def _positions(content: Tensor, given: Tensor | None) -> Int[Tensor, "#batch position"]:
    return position_ids(content) if given is None else given


def _additive(
    visible: Bool[Tensor, "batch key"], queries: int, dtype: torch.dtype
) -> Float[Tensor, "batch 1 query key"]:
    """`additive_mask` of every query alike."""
    return additive_mask(visible, dtype)[:, None, None].expand(-1, -1, queries, -1)
