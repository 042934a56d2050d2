"""LLaDA2.0, 2.1, 2.2 and DMax: mixtures of experts that denoise in blocks; Glm4Moe's layers without causality."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.group_limited_experts import (
    EXPERTS,
    BlockRoutedLayer,
    GroupLimitedExperts,
    blocks_of_pass,
    fused_projections,
)
from dlm_lens.adapters.masked_diffusion import (
    DMAX_SAMPLER,
    LLADA2_EDITING_SAMPLER,
    LLADA2_LEVENSHTEIN_SAMPLER,
    LLADA2_MULTI_BLOCK_SAMPLER,
    LLADA2_SAMPLER,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family
from dlm_lens.attention.cache_argument import CURRENT, NEW

NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
"""Fields of the authors' config -> the names of Glm4MoeConfig; the others are the same, or fields of this class."""

FIXED: dict[str, Any] = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "norm_topk_prob": True}
"""Fields that the authors' model file does not read; another value describes another router."""

LAYERS = ["Glm4MoeDecoderLayer", "BlockRoutedLayer"]
"""The modules that a device map leaves whole."""


@strict
class LLaDA2Config(OriginalFields, Glm4MoeConfig):
    """Config of LLaDA2: accepts the authors' fields and writes them back beside those of Glm4Moe.

    Args:
        use_bias: the attention's output projection has a bias.
        expert_capacity: in LLaDA2.2, the experts among which the tokens of a block choose; None or 0: of groups.
        block_size: the tokens of such a block.
        delete_token_id: in LLaDA2.2, the proposal that deletes a token.
        split_token_id: likewise, the proposal that inserts a mask before a token.

    Raises:
        ValueError: a router that LLaDA2 does not have, or experts that do not fit it; one of LLaDA2.2's two tokens
            without the other.
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
    expert_capacity: int | None = None
    block_size: int | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the authors' names of fields before Glm4Moe reads its own; switch the cache off."""
        for name, wanted in FIXED.items():
            given = kwargs.pop(name, None)
            if given not in (None, wanted):
                raise ValueError(f"LLaDA2 config has {name}={given!r}; only {wanted!r} is implemented")
        self.take_original_names(kwargs)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if (self.delete_token_id is None) != (self.split_token_id is None):
            raise ValueError(
                f"delete_token_id is {self.delete_token_id} and split_token_id {self.split_token_id}: LLaDA2.2 has "
                "both, other models neither"
            )
        if self.sampler is None and self.delete_token_id is not None:
            self.sampler = "llada2_levenshtein"
        if self.trained_block_length is None:
            self.trained_block_length = self.expert_block_length
        self._check_router()
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache, self.norm_topk_prob = False, self.num_experts_per_tok > 1

    @property
    def expert_block_length(self) -> int | None:
        """The tokens of a block whose tokens choose among few experts; None where every token chooses alone."""
        return self.block_size if self.expert_capacity else None

    def _check_router(self) -> None:
        """Raise if the experts do not fit the router."""
        groups, experts = self.n_group, self.n_routed_experts
        if self.expert_capacity:
            if not self.block_size or not self.num_experts_per_tok <= self.expert_capacity <= experts:
                raise ValueError(
                    f"expert_capacity is {self.expert_capacity} and block_size {self.block_size}: a block of at "
                    f"least 1 token shares {self.num_experts_per_tok} (num_experts_per_tok) to {experts} experts"
                )
            return
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

    def to_dict(self) -> dict[str, Any]:
        """The fields without those that follow from others."""
        values = super().to_dict()
        values.pop("norm_topk_prob", None)  # follows from num_experts_per_tok
        return values


class LLaDA2EditingConfig(LLaDA2Config):
    """The same config under the model type by which dllm tells 2.1, whose sampler edits, from 2.0."""

    model_type = "llada21_moe"
    sampler: str | None = "llada2_editing"


EPS = 1e-6
"""Added to the length of a mixed embedding before the division by it, as in the authors' code."""


class SoftInputs(nn.Module):
    """The inputs of a pass some of whose tokens are uncertain.

    With p the probability of a token, e its embedding and m that of [MASK], the input is h = p e + (1 - p) m, times
    (p |e| + (1 - p) |m|) / (|h| + 1e-6), so that it is as long as embeddings are (soft parallel decoding,
    2604.08302; czg1225/DMax, parallel_strategy.py, `decode_uniform` with its `top_k` of 1). The probability is
    float32, and the result has the dtype of the embeddings.
    """

    def forward(
        self,
        embeddings: Float[Tensor, "batch position d_model"],
        mask: Float[Tensor, "d_model"],
        confidence: Float[Tensor, "batch position"],
    ) -> Float[Tensor, "batch position d_model"]:
        """Return the inputs.

        Args:
            embeddings: of the tokens.
            mask: the embedding of [MASK].
            confidence: the probability of each token; -inf where the input is its embedding.
        """
        soft = confidence > -torch.inf
        # Numbers in place of -inf, or gradients through the positions that are not soft would not be finite.
        likely = confidence.masked_fill(~soft, 1.0)[..., None]
        other = (1 - likely).clamp(min=0)
        mixed = embeddings * likely + mask * other
        length = embeddings.norm(dim=-1, keepdim=True) * likely + mask.norm() * other
        mixed = mixed * (length / (mixed.norm(dim=-1, keepdim=True) + EPS))
        return torch.where(soft[..., None], mixed.to(embeddings.dtype), embeddings)


class LLaDA2Decoder(Glm4MoeModel):
    """Glm4Moe's decoder with a router of LLaDA2's, and a bias in the attention's output where the config says so.

    The child `soft_inputs` is called in passes with `token_confidence`, as DMax's sampler makes them; its output is
    the input of the first layer.
    """

    _no_split_modules: ClassVar[list[str]] = LAYERS

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__(config)
        if config.expert_block_length:
            layers = (BlockRoutedLayer(config, index) for index in range(config.num_hidden_layers))
            self.layers = nn.ModuleList(layers)
        for layer in cast(Any, self.layers):
            if config.use_bias:
                attention = layer.self_attn
                attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=True)
            if isinstance(layer.mlp, Glm4MoeMoE) and not config.expert_block_length:
                layer.mlp = GroupLimitedExperts(config)
        self.soft_inputs = SoftInputs()
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        use_cache: bool | None = None,
        token_confidence: Float[Tensor, "batch position"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """States after the last norm, `[batch, position, d_model]`.

        Args:
            input_ids: tokens.
            attention_mask: of transformers.
            position_ids: of every token.
            past_key_values: keys and values of earlier positions.
            inputs_embeds: in place of `input_ids`.
            use_cache: whether keys and values are kept.
            token_confidence: the probability of each of `input_ids`, whose embedding is mixed with that of [MASK]
                (`SoftInputs`); -inf where it is not.
            **kwargs: of transformers' own decoder.
        """
        if token_confidence is not None:
            assert input_ids is not None
            # The method, not the module: hooks on the embedding see the tokens of the pass alone.
            mask = self.embed_tokens.forward(input_ids.new_tensor([self.config.mask_token_id]))
            inputs_embeds = self.soft_inputs(self.embed_tokens(input_ids), mask[0], token_confidence)
        cache = kwargs.pop(NEW, past_key_values)
        if (length := self.config.expert_block_length) is not None:
            shape = tuple(cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds).shape[:2])
            cached = 0 if cache is None else int(cache.get_seq_length())
            kwargs["routing_blocks"] = blocks_of_pass(length, position_ids, attention_mask, shape, cached)
        return super().forward(
            input_ids=input_ids if token_confidence is None else None,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CURRENT: cache},
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class LLaDA2ForMaskedLM(MaskedDiffusionMixin, Glm4MoeForCausalLM):
    """LLaDA2; parity with the original: tests/adapters/test_llada2.py."""

    config_class = LLaDA2Config
    decoder_class: ClassVar[type[Any]] = LLaDA2Decoder
    _no_split_modules: ClassVar[list[str]] = LAYERS

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__(config)
        # Without the router's weights, which transformers 5.24 loads in float32 too.
        self._keep_in_fp32_modules_strict = {"e_score_correction_bias"}

    @property
    def generation_settings(self) -> dict[str, Any]:
        """The ends of LLaDA2.2's texts, of which generation_config.json names two: of the text and of a turn."""
        ends: Any = getattr(self.generation_config, "eos_token_id", None)
        edits = getattr(self.config, "delete_token_id", None) is not None
        return {"eos_token_id": ends} if edits and ends is not None else {}

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
RELEASED_2_2 = ("inclusionAI/LLaDA2.2-mini", "inclusionAI/LLaDA2.2-flash")
RELEASED_DMAX = ("Zigeng/DMax-16B", "Zigeng/DMax-Math-16B", "Zigeng/DMax-Coder-16B")
RELEASED_MULTI_BLOCK = ("SJTU-DENG-Lab/MBD-Math-LLaDA2-mini-16B", "SJTU-DENG-Lab/MBD-Coder-LLaDA2-mini-16B")
RELEASED = (*RELEASED_2_0, *RELEASED_2_1, *RELEASED_2_2, *RELEASED_DMAX, *RELEASED_MULTI_BLOCK)

FAMILY = Family(
    name="llada2",
    layouts={
        "llada2_moe": (LLaDA2Config, LLaDA2ForMaskedLM),
        "llada21_moe": (LLaDA2EditingConfig, LLaDA2EditingForMaskedLM),
    },
    samplers={
        "llada2": LLADA2_SAMPLER,
        "llada2_editing": LLADA2_EDITING_SAMPLER,
        "llada2_levenshtein": LLADA2_LEVENSHTEIN_SAMPLER,
        "dmax": DMAX_SAMPLER,
        "multi_block": LLADA2_MULTI_BLOCK_SAMPLER,
    },
    hub_names=RELEASED,
    hub_samplers={
        **dict.fromkeys(RELEASED_2_1, "llada2_editing"),
        **dict.fromkeys(RELEASED_2_2, "llada2_levenshtein"),
        **dict.fromkeys(RELEASED_DMAX, "dmax"),
        **dict.fromkeys(RELEASED_MULTI_BLOCK, "multi_block"),
    },
    hub_block_lengths=dict.fromkeys(RELEASED, 32),
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
