"""BD3-LM: block diffusion of 2503.09573, MDLM's network under block causal attention."""

from typing import Any, ClassVar

from dlm_lens.adapters.dit import GPT2_TOKENS, TENSOR_NAMES, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.masked_diffusion import BD3LM_SAMPLER, MDLM_SAMPLER
from dlm_lens.adapters.registry import Family


class BD3LMConfig(DiTConfig):
    """Config of BD3-LM: MDLM's fields, and blocks.

    Args:
        block_size: tokens of a block, counted from the first token of a text.
        cross_attn: whether attention is block causal; without, the network sees the whole canvas, and samples as
            MDLM does.
        causal: an AR model with these layers, which is not one of this library's families.
        attn_backend: the original's attention function ("flex", "sdpa"), of no effect here.
        var_min: whether the noise of the training was clipped to `sampling_eps_min` and `sampling_eps_max`.

    Raises:
        ValueError: `causal`, or the sampler of MDLM for a network of blocks.
    """

    model_type = "bd3lm"
    original_class: ClassVar[str | None] = "BD3LM"
    block_size: int = 4
    cross_attn: bool = True
    causal: bool = False
    attn_backend: str = "flex"
    var_min: bool = True
    sampling_eps_min: float = 1e-3
    sampling_eps_max: float = 0.999

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the options, and take MDLM's sampler for a network without blocks."""
        super().__post_init__(**kwargs)
        if self.causal:
            raise ValueError(
                "BD3-LM config has causal=True, an AR model of the paper's comparison; only False is implemented"
            )
        if not self.cross_attn:
            self.sampler = "mdlm"
        elif self.sampler == "mdlm" and self.block_size < self.max_position_embeddings:
            raise ValueError(
                f"the sampler 'mdlm' decodes the whole canvas at once, and this network sees blocks of "
                f"{self.block_size}; leave sampler out"
            )

    @property
    def block_causal_length(self) -> int | None:
        """Of the blocks of the model's own forward; None where it sees the whole canvas."""
        return self.block_size if self.cross_attn else None

    @property
    def trained_block_length(self) -> int | None:
        """The block length of the training, for the sampler of blocks."""
        return None if self.sampler == "mdlm" else self.block_size

    @property
    def empty_prompt(self) -> list[int] | None:
        """The ids that an empty prompt stands for: BOS, with which every text of the training begins."""
        if self.sampler == "mdlm":
            return []
        return None if self.bos_token_id is None else [self.bos_token_id]


class BD3LMForMaskedLM(DiTForMaskedLM):
    """BD3-LM; parity with the original: tests/adapters/test_bd3lm.py."""

    config_class = BD3LMConfig


FAMILY = Family(
    name="bd3lm",
    layouts={"bd3lm": (BD3LMConfig, BD3LMForMaskedLM)},
    samplers={"bd3lm": BD3LM_SAMPLER, "mdlm": MDLM_SAMPLER},
    hub_names=(
        "kuleshov-group/bd3lm-owt-block_size4",
        "kuleshov-group/bd3lm-owt-block_size8",
        "kuleshov-group/bd3lm-owt-block_size16",
        "kuleshov-group/bd3lm-owt-block_size1024-pretrain",
    ),
    **GPT2_TOKENS,
    **TENSOR_NAMES,
)
