"""Qwen2 layers as a DLM of uniform noise: no mask token, open positions hold random tokens."""

from dlm_lens.adapters.families.sink_qwen import SinkQwenConfig, SinkQwenForMaskedLM
from dlm_lens.adapters.registry import Family

ENTROPY_BOUND_SAMPLER = {
    "steps": 48,
    "gen_length": 128,
    "entropy_bound": 0.1,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}
"""The defaults of DiffusionGemma's generation in transformers, whose canvas has 256 tokens."""


class UniformQwenConfig(SinkQwenConfig):
    """Config of a Qwen2 DLM of uniform noise: `SinkQwenConfig`'s fields, and `mask_token_id` is not used.

    Noise is uniform over the ids 0, ..., vocab_size - 1.
    """

    model_type = "uniform_qwen"


class UniformQwenForDiffusion(SinkQwenForMaskedLM):
    """Qwen2 layers that see the whole canvas and predict every position of it, open or decided."""

    config_class = UniformQwenConfig


FAMILY = Family(
    name="uniform_qwen",
    layouts={"uniform_qwen": (UniformQwenConfig, UniformQwenForDiffusion)},
    samplers={"entropy_bound": ENTROPY_BOUND_SAMPLER},
    has_mask_token=False,
)
