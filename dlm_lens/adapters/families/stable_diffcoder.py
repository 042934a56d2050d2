"""Stable-DiffCoder: Llama layers under block causal attention, whose blocks are counted from the text."""

from typing import ClassVar

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 128, "block_length": 4, "threshold": 0.95, "temperature": 0.0}
"""The defaults of the authors' `generate`."""


class StableDiffCoderConfig(MaskedDiffusionFields, LlamaConfig):
    """Config of Stable-DiffCoder: Llama's fields, and the length of the blocks of its training."""

    model_type = "stable_diffcoder"
    original_class: ClassVar[str | None] = "StableDiffcoderForCausalLM"
    original_architecture: ClassVar[str] = "DlmLensLlama"
    block_size: int = 4

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.block_size


class StableDiffCoderModel(MaskedDiffusionMixin, LlamaForCausalLM):
    """Llama layers without causality; `denoise` gives them the blocks.

    Parity with the original: tests/adapters/test_stable_diffcoder.py.
    """

    config_class = StableDiffCoderConfig


FAMILY = Family(
    name="stable_diffcoder",
    layouts={"stable_diffcoder": (StableDiffCoderConfig, StableDiffCoderModel)},
    samplers={"stable_diffcoder": SAMPLER},
    hub_names=("ByteDance-Seed/Stable-DiffCoder-8B-Instruct", "ByteDance-Seed/Stable-DiffCoder-8B-Base"),
    # config.json says model_type llama; the second class is that of the first release.
    architectures={
        "StableDiffcoderForCausalLM": "stable_diffcoder",
        "SeedDiffcoderForCausalLM": "stable_diffcoder",
    },
    adapted={"llama": "stable_diffcoder"},
    # The authors' `generate` has the mask, <[MASK_TOKEN]>, as a default; config.json has none.
    special_ids={155136: {"mask": 5, "eos": 2}},
)
