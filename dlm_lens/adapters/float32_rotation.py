"""Rotation of queries and keys in float32 in a model of half precision (LLaDA, MMaDA, SMDM)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from dlm_lens.attention.cache_argument import NEW, OLD


class Float32RotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary tables that stay in float32 whatever the model's dtype (LLaDA's `rope_full_precision`)."""

    def forward(
        self, x: Tensor, position_ids: Int[Tensor, "#batch position"]
    ) -> tuple[Float[Tensor, "#batch position d_head"], Float[Tensor, "#batch position d_head"]]:
        """Return cos and sin in float32; of `x` only the device matters."""
        return super().forward(torch.empty(0, device=x.device, dtype=torch.float32), position_ids)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the frequencies without another dtype: `model.to(torch.bfloat16)` would round them."""

        def moved(frequencies: Tensor) -> Tensor:
            found = fn(frequencies)
            return found if found.dtype == frequencies.dtype else frequencies.to(found.device)

        return super()._apply(moved, recurse)


class RoundedKeys:
    """A cache of keys and values as attention updates it, which rounds the new keys to the dtype of the values.

    Args:
        kept: the cache of the call.
    """

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the cache's."""
        found: tuple[Tensor, Tensor] = self.kept.update(keys.to(values.dtype), values, *args, **kwargs)
        return found


class KeyRounding(nn.Module):
    """Mixin before an attention of transformers whose keys are rotated in float32.

    The authors' rotation returns keys in the dtype of the projections, and `attention.functions.attend` rounds them
    to that of the values. The module gives them to a cache before: kept in float32 they would take twice the
    memory, and transformers before 5.24 then keeps the values in float32 too, which the output projection of a
    model in half precision refuses.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """As the host's."""
        for name in (NEW, OLD):
            if options.get(name) is not None:
                options[name] = RoundedKeys(options[name])
        return super().forward(*args, **options)


class Float32RotatedAttention(KeyRounding, LlamaAttention):
    """Llama's attention with keys that are rotated in float32."""


def rotate_in_float32(
    decoder: Any, tables: Float32RotaryEmbedding, attention: type[KeyRounding] = Float32RotatedAttention
) -> None:
    """Let a decoder of Llama's layers rotate queries and keys in float32, and round them then.

    Args:
        decoder: whose rotary tables are replaced.
        tables: in float32.
        attention: class of its attention modules, which have the same children.
    """
    decoder.rotary_emb = tables
    for layer in decoder.layers:
        layer.self_attn.__class__ = attention
