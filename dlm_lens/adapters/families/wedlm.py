"""WeDLM: Qwen3 or Qwen2.5 layers under causal attention in another order, observed tokens first, then masks."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from jaxtyping import Bool
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin, MaskOrderedDecoder
from dlm_lens.adapters.registry import Family
from dlm_lens.attention import observed_first

SAMPLER = {
    "gen_length": 128,
    "window_length": 16,
    "entropy_threshold": 0.4,
    "position_penalty": 0.02,
    "temperature": 0.2,
}
"""The defaults of Tencent/WeDLM's SamplingParams and Config; gen_length is ours (their max_tokens is 64)."""


@strict
class WeDLMConfig(MaskedDiffusionFields, Qwen3Config):
    """Config of WeDLM: Qwen3's fields, and whether queries and keys have norms.

    Args:
        qk_norm: with norms of q and k the layers are Qwen3's; without, Qwen2.5's, whose q, k and v have a bias.

    Raises:
        ValueError: norms beside a bias, or neither of them.
    """

    model_type = "wedlm"
    original_class: ClassVar[str | None] = "WeDLMForCausalLM"
    observed_first: ClassVar[bool] = True
    attention_bias: bool = True
    qk_norm: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check that the layers are those of one of the two networks."""
        if self.attention_bias == self.qk_norm:
            raise ValueError(
                f"qk_norm is {self.qk_norm} and attention_bias {self.attention_bias}; WeDLM has the layers of "
                "Qwen3 (qk_norm true, attention_bias false) or of Qwen2.5 (qk_norm false, attention_bias true)"
            )
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        if not self.qk_norm:
            host: Any = self
            host.base_model_tp_plan = {
                name: part for name, part in host.base_model_tp_plan.items() if not name.endswith("_norm")
            }

    @property
    def original_architecture(self) -> str:
        """The layout for a TransformerLens bridge."""
        return "DlmLensQwen3" if self.qk_norm else "DlmLensQwen2"


class WeDLMDecoder(MaskOrderedDecoder, Qwen3Model):
    """Qwen3's or Qwen2.5's layers, whose attention is causal in the order of `attention.observed_order`.

    The authors' code moves observed tokens before the masks, attends causally and keeps every token's own rotary
    position. Here the canvas keeps its order, and the mask [query, key] says the same.
    """

    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": Qwen3DecoderLayer,
        "attentions": [Qwen3Attention, Qwen2Attention],
    }

    def __init__(self, config: WeDLMConfig) -> None:
        super().__init__(config)
        if not config.qk_norm:
            for index, layer in enumerate(self.layers):
                layer.self_attn = Qwen2Attention(config, index)
            self.post_init()

    def visible(
        self, content: Bool[Tensor, "batch key"], masked: Bool[Tensor, "batch key"]
    ) -> Bool[Tensor, "batch 1 key key"]:
        """Which position sees which: observed tokens come first."""
        return observed_first(content, masked)


class WeDLMModel(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """WeDLM; parity with the original: tests/adapters/test_wedlm.py."""

    config_class = WeDLMConfig
    decoder_class = WeDLMDecoder


_IDS = {"mask": 151665, "eos": 151643, "eot": 151645}

FAMILY = Family(
    name="wedlm",
    layouts={"wedlm": (WeDLMConfig, WeDLMModel)},
    samplers={"wedlm": SAMPLER},
    hub_names=(
        "tencent/WeDLM-8B-Instruct",
        "tencent/WeDLM-8B-Base",
        "tencent/WeDLM-7B-Instruct",
        "tencent/WeDLM-7B-Base",
    ),
    # config.json says mask_token_id null; the authors' engine and training then take 151665.
    special_ids={151936: _IDS, 152064: _IDS},
    tiny={"head_dim": 8, "qk_norm": True, "attention_bias": False},
)
