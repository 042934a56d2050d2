"""UDLM: the DLM of uniform noise of 2412.10193, MDLM's DiT with BERT's tokens, given the noise level."""

from typing import Any, ClassVar

from dlm_lens.adapters.dit import TENSOR_NAMES, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.registry import Family

UDLM_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "noise_removal": "none",
    "eps": 1e-5,
    "temperature": 1.0,
    "top_p": None,
}
"""What scripts/eval_lm1b_gen_ppl.sh of kuleshov-group/discrete-diffusion-guidance sets, without the cache."""


class UDLMConfig(DiTConfig):
    """Config of UDLM: MDLM's fields; there is no mask token, and noise is uniform over the vocabulary.

    Args:
        cfg: whether the network is given a class too, for classifier-free guidance, which is not implemented.
        cfg_num_classes: of no effect without it.

    Raises:
        ValueError: `cfg`.
    """

    model_type = "udlm"
    original_class: ClassVar[str | None] = "UDLM"
    subs: ClassVar[bool] = False
    vocab_size: int = 30522
    max_position_embeddings: int = 128
    time_conditioning: bool = True
    cfg: bool = False
    cfg_num_classes: int = -1

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the options."""
        super().__post_init__(**kwargs)
        if self.cfg:
            raise ValueError(
                f"UDLM config has cfg=True, a network that is also given one of {self.cfg_num_classes} classes; "
                "only networks without classes (cfg=False) are implemented"
            )


class UDLMForDiffusion(DiTForMaskedLM):
    """A DiT that predicts every position of the canvas; parity with the original: tests/adapters/test_udlm.py."""

    config_class = UDLMConfig


FAMILY = Family(
    name="udlm",
    layouts={"udlm": (UDLMConfig, UDLMForDiffusion)},
    samplers={"udlm": UDLM_SAMPLER},
    has_mask_token=False,
    hub_names=("kuleshov-group/udlm-lm1b",),
    special_ids={30522: {"bos": 101, "eos": 102, "pad": 0}},
    tokenizers={30522: ("google-bert/bert-base-uncased", "bert")},
    text_options={"add_special_tokens": False},  # [SEP] would end the text before its continuation
    **TENSOR_NAMES,
)
