"""I-DLM: Qwen3 layers under causal attention, whose masks are drafts of the tokens that follow."""

from typing import Any, ClassVar, cast

from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from dlm_lens.adapters.float32_parts import use_weighted_norms
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin, MaskOrderedDecoder
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 128, "stride": 4, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
"""Of the authors' idlm_blockN4_config.yaml; gen_length is ours."""


class IDLMConfig(MaskedDiffusionFields, Qwen3Config):
    """Config of I-DLM: Qwen3's fields, and those of the authors' class, which is SDAR's with `use_regular_causal`.

    Args:
        block_size: of the training; the authors decode with longer strides.
        use_regular_causal: attention is causal; only that is here.

    Raises:
        ValueError: `use_regular_causal` is off, as in an SDAR.
    """

    model_type = "i_dlm"
    original_class: ClassVar[str | None] = "SDARForCausalLM"
    original_architecture: ClassVar[str] = "DlmLensQwen3"
    mask_window: ClassVar[int] = 1
    logit_shift: bool = True
    block_size: int = 3
    use_regular_causal: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check that attention is causal."""
        if not self.use_regular_causal:
            raise ValueError(
                f"use_regular_causal is {self.use_regular_causal}; the attention of an I-DLM is causal: load an "
                'SDAR with family="sdar"'
            )
        super().__post_init__(**kwargs)


class IDLMDecoder(MaskOrderedDecoder, Qwen3Model):
    """Qwen3's layers; a window of one position is causal attention."""


class IDLMModel(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """I-DLM; norms are those of the authors' fused kernel. Parity: tests/adapters/test_i_dlm.py."""

    config_class = IDLMConfig
    decoder_class = IDLMDecoder

    def __init__(self, config: IDLMConfig) -> None:
        super().__init__(config)
        use_weighted_norms(cast(nn.Module, self.model))


FAMILY = Family(
    name="i_dlm",
    layouts={"i_dlm": (IDLMConfig, IDLMModel)},
    samplers={"i_dlm": SAMPLER},
    hub_names=("yifanyu/I-DLM-8B", "yifanyu/I-DLM-32B"),
    adapted={"sdar": "i_dlm"},
    adapted_field="use_regular_causal",
    special_ids={151936: {"mask": 151669, "eos": 151643, "eot": 151645}},
)
