"""Dream and DiffuCoder: Qwen2 layers without causality, whose output at i - 1 predicts position i."""

from typing import Any, ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.masked_diffusion import (
    D2F_SAMPLER,
    D3LLM_SAMPLER,
    DREAM_SAMPLER,
    P2_SAMPLER,
    MaskedDiffusionMixin,
)
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family


class DreamConfig(OriginalFields, Qwen2Config):
    """Config of Dream; the hub's says `use_cache: true`, which a bidirectional model cannot."""

    model_type = "Dream"
    original_architecture: ClassVar[str] = "DlmLensQwen2"
    is_causal: bool = False
    logit_shift: bool = True
    mask_token_id: int | None = None
    eot_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Switch off the cache, since every step sees the whole canvas anew, and windows, which Dream never has."""
        # The original's attention ignores these fields, which came with Qwen2's config.
        self.use_sliding_window, self.layer_types = False, None
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache = False


class DreamModel(MaskedDiffusionMixin, Qwen2ForCausalLM):
    """Dream-7B; parity with the original: tests/adapters/test_dream.py. Its logits are not shifted, its loss is."""

    config_class = DreamConfig


FAMILY = Family(
    name="dream",
    layouts={"Dream": (DreamConfig, DreamModel)},
    samplers={"dream": DREAM_SAMPLER, "p2": P2_SAMPLER, "d2f": D2F_SAMPLER, "d3llm": D3LLM_SAMPLER},
    hub_names=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Base-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Base",
        "apple/DiffuCoder-7B-Instruct",
        "apple/DiffuCoder-7B-cpGRPO",
        "d3LLM/d3LLM_Dream",
        "d3LLM/d3LLM_Dream_Coder",
        "Zigeng/dParallel_Dream_7B_Instruct",
    ),
    hub_samplers=dict.fromkeys(("d3LLM/d3LLM_Dream", "d3LLM/d3LLM_Dream_Coder"), "d3llm"),
    special_ids={152064: {"mask": 151666, "eos": 151643}},
    # The released tokenizers are vocab.json and merges.txt, and a class with Qwen2's normalisation and splitting.
    tokenizer_classes={"DreamTokenizer": "Qwen2Tokenizer"},
)
