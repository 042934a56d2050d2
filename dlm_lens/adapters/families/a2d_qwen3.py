"""A2D: Qwen3, Qwen2 and Llama turned masked DLMs by dllm, with the host's layers and names, without causality."""

from typing import ClassVar

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dlm_lens.adapters.masked_diffusion import (
    DLLM_BLOCK_SAMPLER,
    DLLM_SAMPLER,
    MaskedDiffusionFields,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.registry import Family


class A2DQwen3Config(MaskedDiffusionFields, Qwen3Config):
    """Config of a Qwen3 masked DLM."""

    model_type = "a2d-qwen3"
    original_class: ClassVar[str | None] = "A2DQwen3LMHeadModel"
    trained_block_length: int | None = None
    original_architecture: ClassVar[str] = "DlmLensQwen3"


class A2DQwen3Model(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """Qwen3 layers that see the whole canvas; parity with the original: tests/adapters/test_a2d_qwen3.py."""

    config_class = A2DQwen3Config


class A2DQwen2Config(MaskedDiffusionFields, Qwen2Config):
    """Config of a Qwen2 masked DLM."""

    model_type = "a2d-qwen2"
    original_class: ClassVar[str | None] = "A2DQwen2LMHeadModel"
    trained_block_length: int | None = None
    original_architecture: ClassVar[str] = "DlmLensQwen2"


class A2DQwen2Model(MaskedDiffusionMixin, Qwen2ForCausalLM):
    """Qwen2 layers that see the whole canvas."""

    config_class = A2DQwen2Config


class A2DLlamaConfig(MaskedDiffusionFields, LlamaConfig):
    """Config of a Llama masked DLM."""

    model_type = "a2d-llama"
    original_class: ClassVar[str | None] = "A2DLlamaLMHeadModel"
    trained_block_length: int | None = None
    original_architecture: ClassVar[str] = "DlmLensLlama"


class A2DLlamaModel(MaskedDiffusionMixin, LlamaForCausalLM):
    """Llama layers that see the whole canvas."""

    config_class = A2DLlamaConfig


BLOCK_LENGTHS = {
    "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1": 32,
    "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1": 32,
    "divelab/OPDLM-0.6B": 4,
    "divelab/OPDLM-8B": 4,
}
"""Released block diffusion checkpoints -> the length of the blocks of their training."""

_BY_NAME = BLOCK_LENGTHS | {
    name.replace("dllm-hub/", "dllm-collection/"): length for name, length in BLOCK_LENGTHS.items()
}
"""The same, with the former name of dllm's organisation, from which the hub redirects."""

FAMILY = Family(
    name="a2d_qwen3",
    layouts={
        "a2d-qwen3": (A2DQwen3Config, A2DQwen3Model),
        "a2d-qwen2": (A2DQwen2Config, A2DQwen2Model),
        "a2d-llama": (A2DLlamaConfig, A2DLlamaModel),
    },
    samplers={"dllm": DLLM_SAMPLER, "dllm_blocks": DLLM_BLOCK_SAMPLER},
    hub_names=(
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        *BLOCK_LENGTHS,
    ),
    hub_samplers=dict.fromkeys(_BY_NAME, "dllm_blocks"),
    hub_block_lengths=_BY_NAME,
    # A user's own masked model of these layers, saved with the config.json of its AR model.
    adapted={"qwen3": "a2d-qwen3", "qwen2": "a2d-qwen2", "llama": "a2d-llama"},
    # The tokenizer gets <|mask|> as its next free id, which is another one in Qwen2.5's; <|im_end|> ends the text.
    special_ids={151936: {"mask": 151669, "eos": 151645}},
    special_ids_of_types={
        "a2d-qwen2": {rows: {"mask": 151665, "eos": 151645} for rows in (151936, 152064)},
        "a2d-llama": {},
    },
    mask_token="<|mask|>",
    chat_options={"enable_thinking": False},
)
