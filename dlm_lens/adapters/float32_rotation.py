"""Rotation of queries and keys in float32 in a model of half precision (LLaDA, MMaDA, SMDM)."""

from collections.abc import Callable
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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


def round_keys(attention: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """A hook before the forward pass of an attention that rotates in float32: its cache gets `RoundedKeys`.

    The authors' rotation returns keys in the dtype of the projections, and `attention.functions.attend` rounds them
    to that of the values. A cache gets them before: kept in float32 they would take twice the memory, and
    transformers before 5.24 then keeps the values in float32 too, which the output projection of a model in half
    precision refuses.
    """
    caches = {name: RoundedKeys(options[name]) for name in (NEW, OLD) if options.get(name) is not None}
    return args, options | caches


def rotate_in_float32(decoder: Any, tables: Float32RotaryEmbedding) -> None:
    """Let a decoder of Llama's layers rotate queries and keys in float32, and round the keys for a cache.

    A hook, so that attention keeps transformers' class and code, which nnsight's `source` shows.

    Args:
        decoder: whose rotary tables are replaced.
        tables: in float32.
    """
    decoder.rotary_emb = tables
    for layer in decoder.layers:
        layer.self_attn.register_forward_pre_hook(round_keys, with_kwargs=True)
