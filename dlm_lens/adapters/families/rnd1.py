"""RND1: Qwen3-MoE layers without causality, whose output at i - 1 predicts position i."""

from collections.abc import Mapping
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dlm_lens.adapters.group_limited_experts import EXPERTS
from dlm_lens.adapters.masked_diffusion import RND1_SAMPLER, MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family


@strict
class RND1Config(MaskedDiffusionFields, Qwen3MoeConfig):
    """Config of RND1: Qwen3-MoE's fields. The released one writes false for no `rope_scaling`, no `sliding_window`.

    Its `moe_backend` chooses a kernel, which is transformers' here.
    """

    model_type = "rnd1"
    original_class: ClassVar[str | None] = "RND1LM"
    original_names: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    logit_shift: bool = True
    tie_word_embeddings: bool = False
    norm_topk_prob: bool = True
    sliding_window: int | bool | None = None


class RND1Model(MaskedDiffusionMixin, Qwen3MoeForCausalLM):
    """RND1-30B-A3B; parity with the original: tests/adapters/test_rnd1.py. Its logits are not shifted."""

    config_class = RND1Config


FAMILY = Family(
    name="rnd1",
    layouts={"rnd1": (RND1Config, RND1Model)},
    samplers={"rnd1": RND1_SAMPLER},
    hub_names=("radicalnumerics/RND1-Base-0910",),
    special_ids={151936: {"mask": 151669, "eos": 151645}},
    conversions=EXPERTS,
    tiny={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
)
