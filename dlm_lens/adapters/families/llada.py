"""LLaDA: Llama layers without causality, under LLaDA's own config and checkpoint names."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.masked_diffusion import (
    D2F_SAMPLER,
    D3LLM_SAMPLER,
    DLLM_VAR_SAMPLER,
    LLADA_SAMPLER,
    P2_SAMPLER,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family

HUB_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
    "weight_tying": "tie_word_embeddings",
}
"""LLaDA's config.json -> the names of LlamaConfig."""

FIXED = {
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
}
"""Options of LLaDA's config that no released checkpoint varies; another value is another architecture."""

ACTIVATIONS = ("silu", "gelu", "relu")
"""Of the gate; the original's default, "swiglu", halves it, so that its weights have other shapes."""


class LLaDAConfig(OriginalFields, LlamaConfig):
    """Config of LLaDA: accepts the original config.json and writes it back beside Llama's names.

    The logits have `embedding_size` columns, which is `vocab_size` here.

    Raises:
        ValueError: an option of the original config asks for a layer that the released models do not have.
    """

    model_type = "llada"
    is_causal: bool = False
    original_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    # `n_kv_heads` says how many heads there are; MMaDA's class has no default for the other name.
    original_options: ClassVar[Mapping[str, Any]] = {**FIXED, "multi_query_attention": None}
    original_properties: ClassVar[frozenset[str]] = frozenset({
        "hidden_size", "num_attention_heads", "num_hidden_layers"
    })  # fmt: skip
    float32_rotation: ClassVar[bool] = True
    original_architecture: ClassVar[str] = "DlmLensLlama"  # the name of its TransformerLens adapter
    bos_token_id: int | None = None  # Llama's is 1
    eos_token_id: int | list[int] | None = None  # Llama's is 2
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    rms_norm_eps: float = 1e-5  # the original's, where config.json has none; Llama's is 1e-6
    intermediate_size: int = 0  # 0: mlp_ratio * d_model

    def __post_init__(self, **kwargs: Any) -> None:
        """Take LLaDA's names before the parent derives head_dim and the rotary parameters from them."""
        for name, value in FIXED.items():
            given = kwargs.pop(name, None)
            if given is not None and given != value:
                raise ValueError(f"LLaDA config has {name}={given!r}; only {value!r} is implemented")
        activation = kwargs.get("activation_type")
        if activation not in (None, *ACTIVATIONS):
            raise ValueError(
                f"LLaDA config has activation_type={activation!r}; only {', '.join(ACTIVATIONS)} are implemented"
            )
        if kwargs.pop("multi_query_attention", None):
            self.num_key_value_heads = 1
        elif "n_heads" in kwargs and kwargs.get("n_kv_heads") is None:
            self.num_key_value_heads = kwargs["n_heads"]
        self.take_original_names(kwargs)
        if not self.intermediate_size:
            self.intermediate_size = (kwargs.get("mlp_ratio") or 4) * self.hidden_size
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache = False


class LLaDAModelLM(MaskedDiffusionMixin, LlamaForCausalLM):
    """LLaDA-8B and its relatives; parity with the original: tests/adapters/test_llada.py."""

    config_class = LLaDAConfig


_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}

FAMILY = Family(
    name="llada",
    layouts={"llada": (LLaDAConfig, LLaDAModelLM)},
    samplers={
        "llada": LLADA_SAMPLER,
        "p2": P2_SAMPLER,
        "d2f": D2F_SAMPLER,
        "d3llm": {**D3LLM_SAMPLER, "lowest": True},
        "dllm_var": DLLM_VAR_SAMPLER,
    },
    hub_names=(
        "GSAI-ML/LLaDA-8B-Base",
        "GSAI-ML/LLaDA-8B-Instruct",
        "GSAI-ML/LLaDA-1.5",
        "GSAI-ML/iLLaDA-8B-Base",
        "d3LLM/d3LLM_LLaDA",
        "Zigeng/dParallel-LLaDA-8B-instruct",
        "maomaocun/dLLM-Var",
    ),
    hub_samplers={"d3LLM/d3LLM_LLaDA": "d3llm", "maomaocun/dLLM-Var": "dllm_var"},
    special_ids={126464: {"mask": 126336, "eos": 126081, "eot": 126348}, 155136: {"mask": 5}},
    renames=(
        (r"model\.transformer\.wte", "model.embed_tokens"),
        (r"model\.transformer\.ln_f", "model.norm"),
        (r"model\.transformer\.ff_out", "lm_head"),
        *(
            (rf"model\.transformer\.blocks\.(\d+)\.{hub}", rf"model.layers.\1.{name}")
            for hub, name in _BLOCK.items()
        ),
    ),
)
