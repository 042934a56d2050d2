"""Small random networks of every language model of transformers, whatever its config calls its sizes."""

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

SINCE_5_24 = Version(transformers.__version__) >= Version("5.24")
PAGES_OF_5_24 = pytest.mark.skipif(
    Version(transformers.__version__).release[:2] != (5, 24),
    reason="the pages count the architectures of transformers 5.24",
)
MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
MASKED_TYPES = tuple(sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES))
VOCABULARY = 128
MOST_PARAMETERS = 30_000_000
IDS = torch.tensor([[5, 9, 14, 3, 77, 20, 41, 8, 60, 22, 33, 12], [5, 9, 14, 3, 77, 20, 41, 8, 60, 7, 33, 12]])

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("lru_width", "mamba_d_ssm"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "index_topk"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("index_n_heads", "altup_num_inputs"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "sliding_window"), 8),
    **dict.fromkeys(("attention_window", "linear_key_head_dim", "linear_value_head_dim", "laurel_rank"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "mamba_n_groups", "n_groups"), 1
    ),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "num_kv_shared_layers"), 0),
    "vocab_size_per_layer_input": VOCABULARY,
    "eos_token_id": 2,
}
"""Names of sizes in configs -> small ones."""

TEXT = ("text_config", "decoder_config")
OF_OTHER_PARTS: Mapping[str, Any] = {"depth": 2, "num_hidden_layers": 2, "embed_dim": 64, "out_hidden_size": 64}
"""Further sizes of networks for images and sound."""

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")

_THREE_COORDINATES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    "gemma4_text": {"global_head_dim": 32, "num_global_key_value_heads": 2, "num_hidden_layers": 6},
    "glm4v_moe_text": {
        "rope_parameters": {**_THREE_COORDINATES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2},
    "qwen2_5_vl_text": {"rope_parameters": _THREE_COORDINATES},
    "qwen2_vl_text": {"rope_parameters": _THREE_COORDINATES},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Model types -> sizes that no common name covers."""


def small_model(model_type: str, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A random network of a model type, in float32 and eval mode, that a few tokens pass through.

    Args:
        model_type: of transformers.
        auto: its class for the task.

    Raises:
        Exception: of the class, where none of the attempts is a network; `ValueError` for a large one.
    """
    errors: list[Exception] = []
    for values in _attempts(model_type):
        try:
            config = AutoConfig.for_model(model_type, **values)
            with torch.device("meta"):
                network = auto.from_config(copy.deepcopy(config))
            if sum(weight.numel() for weight in network.parameters()) > MOST_PARAMETERS:
                raise ValueError(f"a {model_type} has more than {MOST_PARAMETERS:,} parameters at small sizes")
            torch.manual_seed(0)
            model: PreTrainedModel = auto.from_config(config).eval().float()
            with torch.no_grad():
                model(input_ids=IDS)
        except Exception as error:  # whatever a class raises for sizes that it does not take
            errors.append(error)
        else:
            return model
    raise errors[0]


def _attempts(model_type: str) -> Iterator[dict[str, Any]]:
    """Values of configs: with a given width of heads and without, with 2, 4 and 8 layers."""
    for layers in (2, 4, 8):
        for left_out in ((), ("head_dim",), ("rotary_dim",)):
            for absent in (False, True):
                yield values_of(model_type, layers, left_out, absent)


def values_of(model_type: str, layers: int, left_out: Collection[str] = (), absent: bool = False) -> dict[str, Any]:
    """The small sizes of a model type's config, without those left out; also those that are None, if `absent`."""
    sizes = {**SIZES, **dict.fromkeys(DEPTHS, layers)}
    config = AutoConfig.for_model(model_type)
    return _of_all_parts(config, {k: v for k, v in sizes.items() if k not in left_out}, absent)


def _of_all_parts(config: Any, sizes: Mapping[str, Any], absent: bool) -> dict[str, Any]:
    """The sizes of a config and of the configs in it."""
    if "kv_lora_rank" in vars(config):  # multi-head latent attention has as many heads of keys as of queries
        sizes = {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}
    values = _of(config, sizes, absent) | dict(OWN.get(config.model_type, {}))
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig):
            given = sizes if name in TEXT else {**sizes, **OF_OTHER_PARTS}
            own = values.get(name, {})
            values[name] = _of_all_parts(part, given, absent) | {"model_type": part.model_type} | own
    return values


def _of(config: Any, sizes: Mapping[str, Any], absent: bool) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)} | set(type(config).attribute_map)
    stored = vars(config)
    taken = {name: size for name, size in sizes.items() if name in names}
    return {
        name: size
        for name, size in taken.items()
        if (absent or stored.get(type(config).attribute_map.get(name, name)) is not None)
        and not (isinstance(stored.get(name), list | tuple | dict) and name != "eos_token_id")
    }
