"""Qwen2.5 turned masked DLM, as in "One Token Is Enough": sink tokens, or gated attention, or neither."""

from typing import ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from dlm_lens.adapters.masked_diffusion import DREAM_SAMPLER, LLADA_SAMPLER
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.sink_tokens import SinkDecoder, SinkFields, SinkMaskedDiffusion


class SinkQwenConfig(SinkFields, Qwen2Config):
    """Config of a Qwen2 masked DLM; its fields beside Qwen2's are those of `SinkFields`."""

    model_type = "sink_qwen"
    original_architecture: ClassVar[str] = "DlmLensQwen2"


class SinkQwenModel(SinkDecoder, Qwen2Model):
    """Qwen2's decoder with sinks around the canvas."""


class SinkQwenForMaskedLM(SinkMaskedDiffusion, Qwen2ForCausalLM):
    """Qwen2 layers that see the whole canvas; inside are S + num_sinks positions, the logits are the canvas's."""

    config_class = SinkQwenConfig
    decoder_class = SinkQwenModel


FAMILY = Family(
    name="sink_qwen",
    layouts={"sink_qwen": (SinkQwenConfig, SinkQwenForMaskedLM)},
    samplers={"llada": LLADA_SAMPLER, "dream": DREAM_SAMPLER},
)
