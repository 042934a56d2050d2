"""What every masked DLM adds to its host's layers: no causality, hook points, honest refusals."""

from typing import Any, ClassVar, NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dlm_lens.attention import HookedAttention, add_hook_points

LLADA_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "block_length": 128,
    "temperature": 0.0,
    "cfg_scale": 0.0,
    "remasking": "low_confidence",
}
"""The defaults of ML-GSAI/LLaDA's generate.py."""

DREAM_SAMPLER = {"steps": 512, "gen_length": 128, "temperature": 0.0, "remasking": "origin", "eps": 1e-3}
"""The defaults of Dream's DreamGenerationConfig; gen_length is ours."""

SMDM_SAMPLER = {
    "steps": 512,
    "gen_length": 128,
    "temperature": 1.0,
    "cfg_scale": 2.0,
    "remasking": "origin",
    "eps": 1e-5,
}
"""The defaults of ML-GSAI/SMDM's diff_sample; gen_length is ours (its context_length counts the prompt)."""


class Float32RotaryEmbedding(LlamaRotaryEmbedding):
    """Rotary tables that stay in float32 whatever the model's dtype (LLaDA's `rope_full_precision`)."""

    def forward(
        self, x: Tensor, position_ids: Int[Tensor, "#batch position"]
    ) -> tuple[Float[Tensor, "#batch position d_head"], Float[Tensor, "#batch position d_head"]]:
        """Return cos and sin in float32; of `x` only the device matters."""
        return super().forward(torch.empty(0, device=x.device, dtype=torch.float32), position_ids)


class MaskedDiffusion(nn.Module):
    """Mixin in front of a transformers causal LM: the same layers, seeing the whole canvas.

    The mask that transformers builds is bidirectional because the config says `is_causal = False`; the flag on
    each layer covers calls of a bare layer. The head predicts the token of its own position, so `labels` give
    an unshifted cross entropy. A family whose attention or decoder does something of its own names its classes.
    """

    attention_class: ClassVar[type[HookedAttention]] = HookedAttention
    decoder_class: ClassVar[type[Any] | None] = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        model = cast(Any, self)
        if self.decoder_class is not None:
            model.model = self.decoder_class(config)
            model.tie_weights()  # the head was tied to the embedding that left
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        if getattr(config, "float32_rotation", False):
            model.model.rotary_emb = Float32RotaryEmbedding(config)
        add_hook_points(model, self.attention_class)
        model.loss_type = "ForMaskedLM"

    def load_custom_generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Never run a checkpoint's custom_generate/generate.py, even where the caller trusts remote code.

        Raises:
            OSError: which transformers takes for "there is none".
        """
        raise OSError("dlm_lens never executes code that came with a checkpoint")

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: left-to-right generation is not how a masked diffusion model writes."""
        raise NotImplementedError(
            f"{type(self).__name__} is a masked diffusion model and does not generate left to right; "
            "use dlm_lens.denoise(model, prompt)"
        )
