"""`WeightedRMSNorm`: the root mean square norm of networks that ran with a fused kernel (SMDM, SDAR)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


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
