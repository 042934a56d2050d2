"""From a name to a network: the layout that all embedded checkpoints share.

A variant (sink token, gated attention) is one more entry of `VARIANTS`: its config fields, nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from dlm_lens.adapters.families.a2d_qwen3 import A2DQwen2Config, A2DQwen2Model
from dlm_lens.adapters.families.sink_qwen import SinkQwenConfig, SinkQwenForMaskedLM
from dlm_lens.adapters.families.uniform_qwen import (
    ENTROPY_BOUND_SAMPLER,
    UniformQwenConfig,
    UniformQwenForDiffusion,
)
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer

MASKED_DIFFUSION = (SinkQwenConfig, SinkQwenForMaskedLM)
UNIFORM_NOISE = (UniformQwenConfig, UniformQwenForDiffusion)
BLOCK_DIFFUSION = (A2DQwen2Config, A2DQwen2Model)
AUTOREGRESSIVE = (Qwen2Config, Qwen2ForCausalLM)


@dataclass(frozen=True)
class Variant:
    """What distinguishes one embedded model from another.

    classes: config and model, which also decide the objective; fields: config fields beyond the shared
    layout.
    """

    classes: tuple[type[Any], type[Any]]
    sampler_defaults: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Whether the variant is an autoregressive baseline."""
        return self.classes == AUTOREGRESSIVE

    @property
    def uniform(self) -> bool:
        """Whether the variant denoises uniform noise, without a mask token."""
        return self.classes == UNIFORM_NOISE


# 32 answer positions after at most 32 prompt positions: the trained length, 64.
ANSWER_LENGTH = 32
LOW_CONFIDENCE = {
    "steps": ANSWER_LENGTH,
    "gen_length": ANSWER_LENGTH,
    "block_length": 8,
    "temperature": 0.0,
    "cfg_scale": 0.0,
    "remasking": "low_confidence",
}
VARIANTS: dict[str, Variant] = {
    "toy": Variant(MASKED_DIFFUSION, LOW_CONFIDENCE),
    "toy-sink": Variant(MASKED_DIFFUSION, LOW_CONFIDENCE, {"num_sinks": 1}),
    "toy-gated": Variant(MASKED_DIFFUSION, LOW_CONFIDENCE, {"gated_attention": True}),
    "toy-blocks": Variant(BLOCK_DIFFUSION, LOW_CONFIDENCE, {"sampler": "dllm_blocks"}),
    "toy-uniform": Variant(
        UNIFORM_NOISE, {**ENTROPY_BOUND_SAMPLER, "steps": ANSWER_LENGTH, "gen_length": ANSWER_LENGTH}
    ),
    "toy-ar": Variant(AUTOREGRESSIVE, {"gen_length": ANSWER_LENGTH, "temperature": 0.0}),
}


def build_model(name: str, seed: int, **overrides: Any) -> PreTrainedModel:
    """Build a freshly initialised network of a variant, in float32; tests shrink it by config `overrides`.

    Attention is written out as matmul and softmax ("eager"): for training on a CPU that is faster than the
    fused kernel.
    """
    config_class, model_class = VARIANTS[name].classes
    torch.manual_seed(seed)
    config = config_class(**checkpoint_fields(name) | overrides)
    model: PreTrainedModel = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model


def checkpoint_fields(name: str) -> dict[str, Any]:
    """Config fields of a variant: 4 layers of width 128, 4 heads, SwiGLU 344, untied head, special ids."""
    variant, tokenizer = VARIANTS[name], build_tokenizer()
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "use_cache": variant.causal,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "sampler_defaults": variant.sampler_defaults,
    }
    if not (variant.causal or variant.uniform):
        fields["mask_token_id"] = tokenizer.mask_token_id
    return fields | variant.fields
