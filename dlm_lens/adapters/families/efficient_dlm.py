"""Efficient-DLM: Qwen3 layers continued as block diffusion, which sees the whole prompt in both directions."""

from typing import Any, ClassVar

from transformers import Qwen3Config, Qwen3ForCausalLM

from dlm_lens.adapters.families.nemotron_labs_diffusion import RENAMES
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 128, "block_length": 32, "threshold": 0.9, "temperature": 0.7}
"""The settings of the model card's example."""


class EfficientDLMConfig(MaskedDiffusionFields, Qwen3Config):
    """Config of Efficient-DLM: Qwen3's fields, and the length of the blocks.

    Args:
        block_size: positions of a block.
        disable_qk_norm: queries and keys have no norms; not supported, as in the released checkpoints.

    Raises:
        ValueError: no norms of queries and keys.
    """

    model_type = "efficient_dlm"
    original_class: ClassVar[str | None] = "EfficientDLM"
    original_architecture: ClassVar[str] = "DlmLensQwen3"
    block_size: int = 32
    disable_qk_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check that the layers are Qwen3's."""
        if self.disable_qk_norm:
            raise ValueError(
                "disable_qk_norm is True; Qwen3's layers have norms of queries and keys, and every released "
                "Efficient-DLM has them"
            )
        super().__post_init__(**kwargs)

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.block_size


class EfficientDLMModel(MaskedDiffusionMixin, Qwen3ForCausalLM):
    """Qwen3 layers without causality; `denoise` gives them the blocks.

    Parity with the original: tests/adapters/test_efficient_dlm.py.
    """

    config_class = EfficientDLMConfig


FAMILY = Family(
    name="efficient_dlm",
    layouts={"efficient_dlm": (EfficientDLMConfig, EfficientDLMModel)},
    samplers={"efficient_dlm": SAMPLER},
    hub_names=("nvidia/Efficient-DLM-4B", "nvidia/Efficient-DLM-8B"),
    # config.json says model_type qwen3.
    architectures={"EfficientDLM": "efficient_dlm"},
    adapted={"qwen3": "efficient_dlm"},
    # config.json has the mask, <|fim_pad|>; the ends are Qwen3's.
    special_ids={151936: {"mask": 151662, "eos": 151643, "eot": 151645}},
    renames=RENAMES,
)
