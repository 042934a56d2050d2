"""SDAR: layers of Qwen3 or Qwen3-MoE under block causal attention, with blocks counted from the text's start."""

from collections.abc import Mapping
from typing import ClassVar, cast

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_lens.adapters.float32_parts import use_weighted_norms
from dlm_lens.adapters.group_limited_experts import EXPERTS
from dlm_lens.adapters.masked_diffusion import (
    SDAR_MULTI_BLOCK_SAMPLER,
    SDAR_SAMPLER,
    MaskedDiffusionFields,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.registry import Family


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


@strict
class SDARMoeConfig(MaskedDiffusionFields, Qwen3MoeConfig):
    """Config of an SDAR with experts: Qwen3-MoE's fields, and the length of the blocks of its training."""

    model_type = "sdar_moe"
    original_class: ClassVar[str | None] = "SDARMoeForCausalLM"
    original_names: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    block_size: int = 4

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.block_size


class SDARMoeModel(MaskedDiffusionMixin, Qwen3MoeForCausalLM):
    """Qwen3-MoE layers without causality; `denoise` gives them the blocks. Norms are those of `SDARModel`.

    Parity: tests/adapters/test_sdar.py.
    """

    config_class = SDARMoeConfig

    def __init__(self, config: SDARMoeConfig) -> None:
        super().__init__(config)
        use_weighted_norms(cast(nn.Module, self.model))


FAMILY = Family(
    name="sdar",
    layouts={"sdar": (SDARConfig, SDARModel), "sdar_moe": (SDARMoeConfig, SDARMoeModel)},
    samplers={"sdar": SDAR_SAMPLER, "multi_block": SDAR_MULTI_BLOCK_SAMPLER},
    hub_names=(
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
        "JetLM/SDAR-30B-A3B-Chat",
        "JetLM/SDAR-30B-A3B-Sci",
        "Gen-Verse/TraDo-4B-Instruct",
        "Gen-Verse/TraDo-8B-Instruct",
        "Gen-Verse/TraDo-8B-Thinking",
    ),
    # config.json has the mask and <|endoftext|>; a turn ends with <|im_end|>.
    special_ids={151936: {"mask": 151669, "eos": 151643, "eot": 151645}},
    conversions_of_types={"sdar_moe": EXPERTS},
    tiny_of_types={
        "sdar_moe": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        }
    },
)
