"""Parts that compute in float32 in models of half precision (LLaDA, SMDM, SDAR): rotation with its cache, norms."""

from collections.abc import Callable
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


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


class EqualDtypeCache(DynamicCache):
    """A cache that keeps keys in the dtype of the values.

    Keys that are rotated in float32 arrive beside values in the dtype of the weights. Kept so they would take twice
    the memory, and transformers before 5.24 then keeps the values in float32 too, which the output projection of a
    model in half precision refuses. The attention function rounds the keys in the same way, so that a pass with the
    cache equals one without it.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values of a layer, and return all of it."""
        kept: tuple[Tensor, Tensor] = super().update(
            key_states.to(value_states.dtype), value_states, layer_idx, *args, **kwargs
        )
        return kept


class WeightedRMSNorm(LlamaRMSNorm):
    """RMSNorm that multiplies by the weight before it casts back, as fused kernels do.

    transformers' norms cast first. In bfloat16 the two differ in the last bit, and logits by some hundredths.
    """

    def forward(self, hidden_states: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return x / sqrt(mean(x^2) + eps) * weight, computed in float32, in the dtype of x."""
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (normed * self.weight.float()).to(hidden_states.dtype)


def use_weighted_norms(decoder: nn.Module) -> None:
    """Replace every norm of a decoder that is not loaded yet: of layers, of queries and keys, the last one."""
    norms = [(name, part) for name, part in decoder.named_modules() if hasattr(part, "variance_epsilon")]
    for name, norm in norms:
        decoder.set_submodule(name, WeightedRMSNorm(norm.weight.numel(), norm.variance_epsilon))
