"""Llama turned masked DLM: the sibling of `sink_qwen` for checkpoints of Llama's layout."""

from typing import ClassVar

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from dlm_lens.adapters.masked_diffusion import DREAM_SAMPLER, LLADA_SAMPLER
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.sink_tokens import SinkDecoder, SinkFields, SinkMaskedDiffusion


class SinkLlamaConfig(SinkFields, LlamaConfig):
    """Config of a Llama masked DLM; its fields beside Llama's are those of `SinkFields`."""

    model_type = "sink_llama"
    original_architecture: ClassVar[str] = "DlmLensLlama"


class SinkLlamaModel(SinkDecoder, LlamaModel):
    """Llama's decoder with sinks around the canvas."""


class SinkLlamaForMaskedLM(SinkMaskedDiffusion, LlamaForCausalLM):
    """Llama layers that see the whole canvas; inside are S + num_sinks positions, the logits are the canvas's."""

    config_class = SinkLlamaConfig
    decoder_class = SinkLlamaModel


FAMILY = Family(
    name="sink_llama",
    layouts={"sink_llama": (SinkLlamaConfig, SinkLlamaForMaskedLM)},
    samplers={"llada": LLADA_SAMPLER, "dream": DREAM_SAMPLER},
)
