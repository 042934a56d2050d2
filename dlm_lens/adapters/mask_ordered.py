"""`MaskOrderedDecoder`: decoders whose attention depends on which ids are [MASK] (WeDLM, SDLM)."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import additive_mask
from dlm_lens.attention.cache_argument import CURRENT, NEW


class MaskOrderedDecoder:
    """Mixin before a decoder of transformers; a subclass defines `visible`."""

    config: Any
    dtype: torch.dtype

    def visible(
        self, content: Bool[Tensor, "batch key"], masked: Bool[Tensor, "batch key"]
    ) -> Bool[Tensor, "batch 1 key key"]:
        """Which position sees which."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The states; a mask [batch, position] is 1 for content and covers the cached positions too.

        A mask [batch, 1, query, key] is taken as it is. Cached positions are taken for tokens.

        Raises:
            ValueError: embeddings without ids and without such a mask.
        """
        past_key_values = kwargs.pop(NEW, past_key_values)
        whole = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4)
        if input_ids is not None and not whole:
            attention_mask = {"full_attention": self._order(input_ids, attention_mask, past_key_values)}
        elif inputs_embeds is not None and not whole:
            raise ValueError(
                f"{type(self).__name__} attends in an order that depends on which ids are [MASK]: give input_ids, "
                "or beside inputs_embeds an attention_mask of [batch, 1, query, key]"
            )
        host: Any = super()
        return host.forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CURRENT: past_key_values},
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _order(
        self, ids: Int[Tensor, "batch position"], mask: Tensor | None, cache: Any
    ) -> Float[Tensor, "batch 1 query key"]:
        """The additive mask."""
        cached = 0 if cache is None else cache.get_seq_length()
        masked = torch.zeros(len(ids), cached + ids.shape[1], dtype=torch.bool, device=ids.device)
        if self.config.mask_token_id is not None:
            masked[:, cached:] = ids == self.config.mask_token_id
        content = torch.ones_like(masked) if mask is None else mask.bool()
        return additive_mask(self.visible(content, masked)[:, :, cached:], self.dtype)
