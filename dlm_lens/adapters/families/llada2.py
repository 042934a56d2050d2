"""LLaDA2.0 and 2.1: mixtures of experts that denoise in blocks; Glm4Moe's layers without causality."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.group_limited_experts import EXPERTS, GroupLimitedExperts, fused_projections
from dlm_lens.adapters.masked_diffusion import LLADA2_EDITING_SAMPLER, LLADA2_SAMPLER, MaskedDiffusionMixin
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family

NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
"""Fields of the authors' config -> the names of Glm4MoeConfig; the others are the same, or fields of this class."""

FIXED: dict[str, Any] = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "norm_topk_prob": True}
"""Fields that the authors' model file does not read; another value describes another router."""


@strict
class LLaDA2Config(OriginalFields, Glm4MoeConfig):
    """Config of LLaDA2: accepts the authors' fields and writes them back beside those of Glm4Moe.

    Args:
        use_bias: the attention's output projection has a bias.

    Raises:
        ValueError: a router that LLaDA2 does not have, or groups that do not fit the experts.
    """

    model_type = "llada2_moe"
    original_class: ClassVar[str | None] = "LLaDA2MoeModelLM"
    original_names: ClassVar[Mapping[str, str]] = NAMES
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None
    trained_block_length: int | None = None
    # Defaults of the authors' config class, where Glm4Moe's are others.
    use_bias: bool = True
    use_qk_norm: bool = True
    n_routed_experts: int = 16
    n_shared_experts: int = 0
    num_experts_per_tok: int = 2
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float | int = 2.5
    first_k_dense_replace: int = 0
    head_dim: int | None = None
    num_mtp_layers: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the authors' names of fields before Glm4Moe reads its own; switch the cache off."""
        for name, wanted in FIXED.items():
            given = kwargs.pop(name, None)
            if given not in (None, wanted):
                raise ValueError(f"LLaDA2 config has {name}={given!r}; only {wanted!r} is implemented")
        self.take_original_names(kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        groups, experts = self.n_group, self.n_routed_experts
        if groups < 1 or experts % groups or experts // groups < 2 or not 1 <= self.topk_group <= groups:
            raise ValueError(
                f"{experts} experts in n_group {groups} with topk_group {self.topk_group}: a router needs groups "
                "of equal size with at least 2 experts, and topk_group from 1 to n_group"
            )
        most = self.topk_group * experts // groups
        if not 1 <= self.num_experts_per_tok <= most:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; {self.topk_group} groups of "
                f"{experts // groups} experts allow 1 to {most}"
            )
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache, self.norm_topk_prob = False, self.num_experts_per_tok > 1

    def to_dict(self) -> dict[str, Any]:
        """The fields without those that follow from others."""
        values = super().to_dict()
        values.pop("norm_topk_prob", None)  # follows from num_experts_per_tok
        return values


class LLaDA2EditingConfig(LLaDA2Config):
    """The same config under the model type by which dllm tells 2.1, whose sampler edits, from 2.0."""

    model_type = "llada21_moe"
    sampler: str | None = "llada2_editing"


class LLaDA2Decoder(Glm4MoeModel):
    """Glm4Moe's decoder with LLaDA2's router, and a bias in the attention's output where the config says so."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__(config)
        for layer in cast(Any, self.layers):
            if config.use_bias:
                attention = layer.self_attn
                attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=True)
            if isinstance(layer.mlp, Glm4MoeMoE):
                layer.mlp = GroupLimitedExperts(config)
        self.post_init()


class LLaDA2ForMaskedLM(MaskedDiffusionMixin, Glm4MoeForCausalLM):
    """LLaDA2; parity with the original: tests/adapters/test_llada2.py."""

    config_class = LLaDA2Config
    decoder_class: ClassVar[type[Any]] = LLaDA2Decoder

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__(config)
        # Without the router's weights, which transformers 5.24 loads in float32 too.
        self._keep_in_fp32_modules_strict = {"e_score_correction_bias"}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether transformers may run the experts as grouped products; it looks for them in this file alone."""
        return True


class LLaDA2EditingForMaskedLM(LLaDA2ForMaskedLM):
    """LLaDA2.1: the same network, whose sampler edits tokens."""

    config_class = LLaDA2EditingConfig


RELEASED_2_0 = tuple(
    f"inclusionAI/LLaDA2.0-{size}{kind}" for size in ("mini", "flash") for kind in ("", "-preview", "-CAP")
)
RELEASED_2_1 = ("inclusionAI/LLaDA2.1-mini", "inclusionAI/LLaDA2.1-flash")

FAMILY = Family(
    name="llada2",
    layouts={
        "llada2_moe": (LLaDA2Config, LLaDA2ForMaskedLM),
        "llada21_moe": (LLaDA2EditingConfig, LLaDA2EditingForMaskedLM),
    },
    samplers={"llada2": LLADA2_SAMPLER, "llada2_editing": LLADA2_EDITING_SAMPLER},
    hub_names=(*RELEASED_2_0, *RELEASED_2_1),
    hub_samplers=dict.fromkeys(RELEASED_2_1, "llada2_editing"),
    hub_block_lengths=dict.fromkeys((*RELEASED_2_0, *RELEASED_2_1), 32),
    special_ids={157184: {"mask": 156895, "eos": 156892}},
    renames=(
        (r"model\.word_embeddings", "model.embed_tokens"),
        (r"\.attention\.dense", ".self_attn.o_proj"),
    ),
    renames_of_options=(
        (r"\.attention\.query_layernorm", ".self_attn.q_norm"),
        (r"\.attention\.key_layernorm", ".self_attn.k_norm"),
        (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ),
    conversions=(fused_projections("weight"), fused_projections("bias"), *EXPERTS),
    tiny={
        "head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_bias": False,
    },
)
