"""CoDA: Qwen3 layers without causality, whose output at i - 1 predicts position i, and Dream's sampler."""

from typing import ClassVar

from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_lens.adapters.masked_diffusion import (
    DREAM_SAMPLER,
    P2_SAMPLER,
    MaskedDiffusionFields,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.registry import Family


class CoDAConfig(MaskedDiffusionFields, Qwen3Config):
    """Config of CoDA: Qwen3's fields.

    The head is tied to the embedding where the checkpoint has no head of its own; the authors' code never ties.
    """

    model_type = "CoDA"
    original_class: ClassVar[str | None] = "CoDALanguageModel"
    original_architecture: ClassVar[str] = "DlmLensQwen3"
    logit_shift: bool = True
    vocab_size: int = 151936
    head_dim: int | None = 128
    tie_word_embeddings: bool = True


class CoDAModel(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """CoDA-1.7B; parity with the original: tests/adapters/test_coda.py. Its logits are not shifted, its loss is."""

    config_class = CoDAConfig


FAMILY = Family(
    name="coda",
    layouts={"CoDA": (CoDAConfig, CoDAModel)},
    samplers={"dream": DREAM_SAMPLER, "p2": P2_SAMPLER},
    hub_names=("Salesforce/CoDA-v0-Base", "Salesforce/CoDA-v0-Instruct"),
    special_ids={151936: {"mask": 151669, "eos": 151645}},
)
