"""Sumi: the 7B DLM of uniform noise of 2606.19005, Llama's layers with the off-by-one softmax."""

from typing import Any, ClassVar

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family
from dlm_lens.attention.softmax_variants import Softmax

SUMI_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "remasking": "ancestral",
    "temperature": 1.0,
    "canvas_length": 2048,
    "delimiter": True,
    "schedule": "linear",
    "min_log_snr": -9.0,
    "max_log_snr": 9.0,
    "tokens_per_step": 1,
}
"""The defaults of tohoku-nlp/sumi-7b's generation_sumi.py; gen_length is ours."""


class SumiConfig(MaskedDiffusionFields, LlamaConfig):
    """Config of Sumi: Llama's fields; there is no mask token, and noise is uniform over the vocabulary.

    Args:
        add_qkv_bias: biases of q, k and v alone, which no released checkpoint has.
        uniform_diffusion_beta_is, uniform_diffusion_z_loss_strength: of terms of the authors' training loss.

    Attributes:
        softmax: every row has a spare entry, A_ij = exp(s_ij) / (1 + sum_k exp(s_ik)), so that no key has to take
            what a head does not use.

    Raises:
        ValueError: `add_qkv_bias`.
    """

    model_type = "sumi"
    original_class: ClassVar[str | None] = "SumiForMaskGeneration"
    original_architecture: ClassVar[str] = "DlmLensLlama"
    softmax: ClassVar[Softmax] = "off_by_one"
    add_qkv_bias: bool = False
    uniform_diffusion_beta_is: float = 1.0
    uniform_diffusion_z_loss_strength: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the options."""
        super().__post_init__(**kwargs)
        if self.add_qkv_bias:
            raise ValueError(
                "Sumi config has add_qkv_bias=True, biases of q, k and v alone, which no released checkpoint has; "
                "only False is implemented"
            )

    @property
    def empty_prompt(self) -> list[int] | None:
        """What stands for an empty prompt: the start of a text."""
        return None if self.bos_token_id is None else [self.bos_token_id]


class SumiForDiffusion(MaskedDiffusionMixin, LlamaForCausalLM):
    """Llama layers that see the whole canvas and predict all of it; parity: tests/adapters/test_sumi.py."""

    config_class = SumiConfig


FAMILY = Family(
    name="sumi",
    layouts={"sumi": (SumiConfig, SumiForDiffusion)},
    samplers={"sumi": SUMI_SAMPLER},
    has_mask_token=False,
    hub_names=("tohoku-nlp/sumi-7b",),
    # For a config.json without them; the released one has all three.
    special_ids={100278: {"bos": 100256, "eos": 100257, "pad": 100277}},
    tiny={"bos_token_id": 60, "sampler_defaults": {"canvas_length": 32}},
)
