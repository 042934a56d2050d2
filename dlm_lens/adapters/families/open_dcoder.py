"""Open-dCoder: Qwen2 without causality, whose output at i - 1 predicts position i, sampled by path planning."""

from typing import ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM

from dlm_lens.adapters.masked_diffusion import (
    DREAM_SAMPLER,
    P2_SAMPLER,
    MaskedDiffusionFields,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.registry import Family


class OpenDCoderConfig(MaskedDiffusionFields, Qwen2Config):
    """Config of Open-dCoder: Qwen2's fields."""

    model_type = "open-dcoder"
    original_architecture: ClassVar[str] = "DlmLensQwen2"
    logit_shift: bool = True


class OpenDCoderModel(MaskedDiffusionMixin, Qwen2ForCausalLM):
    """Open-dCoder-0.5B; parity: tests/adapters/test_open_dcoder.py. Its logits are not shifted, its loss is."""

    config_class = OpenDCoderConfig


FAMILY = Family(
    name="open_dcoder",
    layouts={"open-dcoder": (OpenDCoderConfig, OpenDCoderModel)},
    samplers={"p2": P2_SAMPLER, "dream": DREAM_SAMPLER},
    hub_names=("fredzzp/open-dcoder-0.5B",),
    # The config.json is Qwen2's.
    adapted={"qwen2": "open-dcoder"},
    # Training adds "<M>" to Qwen2.5-Coder's tokenizer, as its next free id.
    special_ids={151936: {"mask": 151665, "eos": 151643}},
    mask_token="<M>",
)
