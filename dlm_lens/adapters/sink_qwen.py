"""Qwen2.5 turned masked DLM, as in "One Token Is Enough": sink tokens, or gated attention, or neither."""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from dlm_lens.adapters.masked_diffusion import DREAM_SAMPLER, LLADA_SAMPLER
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.sink_tokens import SinkDecoder, SinkMaskedDiffusion
from dlm_lens.attention import Placement, SinkLayout


class SinkQwenConfig(Qwen2Config):
    """Config of a Qwen2 masked DLM.

    Args:
        num_sinks: learned sink tokens around the canvas (the paper: 0, 1, 2, 4).
        sink_placement: "front" (Eq. 5) or "end" (Eq. 7).
        zero_sink_value: force the sinks' values to zero in every layer (Table 5).
        gated_attention: z times sigmoid(W_g x), elementwise, before the output projection (appendix A.2).
        logit_shift: position i is predicted by the output at i - 1, for models that began autoregressive.
        sampler: "llada" or "dream"; None for LLaDA's.
        sampler_defaults: settings of `denoise` that travel with the checkpoint.

    Raises:
        ValueError: a negative number of sinks, or an unknown placement.
    """

    model_type = "sink_qwen"
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    num_sinks: int = 0
    sink_placement: Placement = "front"
    zero_sink_value: bool = False
    gated_attention: bool = False
    logit_shift: bool = False
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Switch the cache off: every step sees the whole canvas anew."""
        kwargs.pop("auto_map", None)
        SinkLayout(self.num_sinks, self.sink_placement)
        super().__post_init__(**kwargs)
        self.use_cache = False


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
