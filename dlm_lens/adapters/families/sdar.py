"""SDAR: Qwen3 layers under block causal attention, whose blocks are counted from the first token of the text."""

from typing import ClassVar, cast

from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_lens.adapters.masked_diffusion import (
    SDAR_MULTI_BLOCK_SAMPLER,
    SDAR_SAMPLER,
    MaskedDiffusionFields,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.weighted_norm import use_weighted_norms


class SDARConfig(MaskedDiffusionFields, Qwen3Config):
    """Config of an SDAR: Qwen3's fields, and the length of the blocks of its training."""

    model_type = "sdar"
    original_class: ClassVar[str | None] = "SDARForCausalLM"
    original_architecture: ClassVar[str] = "DlmLensQwen3"
    block_size: int = 4

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.block_size


class SDARModel(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """Qwen3 layers without causality; `denoise` gives them the blocks. Parity: tests/adapters/test_sdar.py.

    Norms, also of queries and keys, are those of the authors' fused kernel.
    """

    config_class = SDARConfig

    def __init__(self, config: SDARConfig) -> None:
        super().__init__(config)
        use_weighted_norms(cast(nn.Module, self.model))


_EXPERTS = (
    "an SDAR with experts (30B-A3B), whose layers are not here; take JetLM/SDAR-1.7B-Chat, -4B-Chat or -8B-Chat"
)

FAMILY = Family(
    name="sdar",
    layouts={"sdar": (SDARConfig, SDARModel)},
    samplers={"sdar": SDAR_SAMPLER, "multi_block": SDAR_MULTI_BLOCK_SAMPLER},
    hub_names=(
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
        "Gen-Verse/TraDo-4B-Instruct",
        "Gen-Verse/TraDo-8B-Instruct",
        "Gen-Verse/TraDo-8B-Thinking",
    ),
    # config.json has the mask and <|endoftext|>; a turn ends with <|im_end|>.
    special_ids={151936: {"mask": 151669, "eos": 151643, "eot": 151645}},
    refused={"sdar_moe": _EXPERTS, "SDARMoeForCausalLM": _EXPERTS},
)
