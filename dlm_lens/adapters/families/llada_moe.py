"""LLaDA-MoE: a masked DLM with a mixture of experts; Qwen3-MoE's layers without causality."""

from collections.abc import Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.group_limited_experts import EXPERTS
from dlm_lens.adapters.masked_diffusion import LLADA_SAMPLER, MaskedDiffusionMixin
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family

NAMES = {
    "expert_intermediate_size": "moe_intermediate_size",
    "dense_intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
}
"""Fields of the authors' config -> the names of Qwen3MoeConfig."""

FIXED: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (True,),
    "clip_qkv": (None,),
    "shared_expert_intermediate_size": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None),
    "partial_rotary_factor": (1, None),
    "routed_scaling_factor": (1, None),
}
"""Options that no released checkpoint varies -> their values; another one is another network."""


@strict
class LLaDAMoEConfig(OriginalFields, Qwen3MoeConfig):
    """Config of LLaDA-MoE: accepts the authors' fields and writes them back beside those of Qwen3-MoE.

    Raises:
        ValueError: an option asks for a layer that the released models do not have.
    """

    model_type = "lladamoe"
    original_names: ClassVar[Mapping[str, str]] = NAMES
    original_options: ClassVar[Mapping[str, Any]] = {name: values[0] for name, values in FIXED.items()}
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None
    moe_layer_freq: list[int] | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-5
    norm_topk_prob: bool | None = False  # the authors' code reads none

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the authors' names of fields before Qwen3-MoE reads its own; switch the cache off."""
        for name, accepted in FIXED.items():
            given = kwargs.pop(name, getattr(self, name, accepted[0]))
            if given not in accepted:
                raise ValueError(f"LLaDA-MoE config has {name}={given!r}; only {accepted[0]!r} is implemented")
        self.take_original_names(kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.moe_layer_freq is not None:  # 0: a dense layer
            self.mlp_only_layers = [layer for layer, sparse in enumerate(self.moe_layer_freq) if not sparse]
        self.decoder_sparse_step, self.norm_topk_prob, self.use_sliding_window = 1, False, False
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache = False

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the kinds of layers as the authors' config has them."""
        values = super().to_dict()
        sparse = [int(layer not in self.mlp_only_layers) for layer in range(self.num_hidden_layers)]
        return values | {"moe_layer_freq": sparse}


class LLaDAMoEModelLM(MaskedDiffusionMixin, Qwen3MoeForCausalLM):
    """LLaDA-MoE; parity with the original: tests/adapters/test_llada_moe.py."""

    config_class = LLaDAMoEConfig


FAMILY = Family(
    name="llada_moe",
    layouts={"lladamoe": (LLaDAMoEConfig, LLaDAMoEModelLM)},
    # The released config.json has LLaDA's model type.
    architectures={"LLaDAMoEModelLM": "lladamoe", "LLaDAMoEModel": "lladamoe"},
    samplers={"llada": LLADA_SAMPLER},
    hub_names=("inclusionAI/LLaDA-MoE-7B-A1B-Base", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"),
    special_ids={157184: {"mask": 156895, "eos": 156892}},
    conversions=EXPERTS,
    tiny={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
)
