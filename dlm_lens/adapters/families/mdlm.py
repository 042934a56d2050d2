"""MDLM: the masked DLM of 2406.07524, a DiT with GPT-2's tokens, which sees the whole canvas."""

from typing import ClassVar

from dlm_lens.adapters.dit import GPT2_TOKENS, TENSOR_NAMES, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.masked_diffusion import MDLM_SAMPLER, REMDM_SAMPLER
from dlm_lens.adapters.registry import Family


class MDLMConfig(DiTConfig):
    """Config of MDLM."""

    model_type = "mdlm"
    original_class: ClassVar[str | None] = "MDLM"


class MDLMForMaskedLM(DiTForMaskedLM):
    """MDLM; parity with the original: tests/adapters/test_mdlm.py."""

    config_class = MDLMConfig


FAMILY = Family(
    name="mdlm",
    layouts={"mdlm": (MDLMConfig, MDLMForMaskedLM)},
    samplers={"mdlm": MDLM_SAMPLER, "remdm": REMDM_SAMPLER},
    hub_names=(
        "kuleshov-group/mdlm-owt",
        "kuleshov-group/mdlm-no_flashattn-fp32-owt",
        "kuleshov-group/mdlm-noeos-owt",
    ),
    **GPT2_TOKENS,
    **TENSOR_NAMES,
)
