"""Qwen2.5 turned masked DLM, as in "One Token Is Enough": Qwen2 layers without causality."""

from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from dlm_lens.adapters.masked_diffusion import MaskedDiffusion
from dlm_lens.adapters.registry import Family


class SinkQwenConfig(Qwen2Config):
    """Config of a Qwen2 masked DLM; `sampler_defaults` travel with the checkpoint."""

    model_type = "sink_qwen"
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Switch the cache off: every step sees the whole canvas anew."""
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)
        self.use_cache = False


class SinkQwenForMaskedLM(MaskedDiffusion, Qwen2ForCausalLM):
    """Qwen2 layers that see the whole canvas; the head predicts the token of its own position."""

    config_class = SinkQwenConfig


FAMILY = Family(
    name="sink_qwen",
    layouts={"sink_qwen": (SinkQwenConfig, SinkQwenForMaskedLM)},
    sampler="llada",
    sampler_defaults={
        "steps": 128,
        "gen_length": 128,
        "block_length": 128,
        "temperature": 0.0,
        "cfg_scale": 0.0,
        "remasking": "low_confidence",
    },
)
