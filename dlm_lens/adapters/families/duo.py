"""Duo: the DLM of uniform noise of 2506.10892, MDLM's DiT with GPT-2's tokens, given the noise level."""

from typing import Any, ClassVar

from dlm_lens.adapters.dit import TENSOR_NAMES, TOKENIZERS, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.registry import Family

DUO_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "noise_removal": "ancestral",
    "eps": 1e-5,
    "temperature": 1.0,
    "top_p": None,
}
"""The defaults of s-sahoo/duo's config.yaml; steps and gen_length are ours (theirs: 1000, the whole context)."""

PSI_SAMPLER = {
    **DUO_SAMPLER,
    "high_mode": "pure-posterior",
    "middle_mode": "pure-posterior",
    "low_mode": "pure-posterior",
    "high_frac": 0.2,
    "middle_frac": 0.6,
    "time_profile": "linear",
}
"""Likewise, of the predictor "psi", which with these is the same."""


class DuoConfig(DiTConfig):
    """Config of Duo: MDLM's fields; there is no mask token, and noise is uniform over the vocabulary.

    Args:
        causal: an AR model with these layers, which is not one of this library's families.
        var_min: of no effect; a field of BD3-LM's configuration, which the original's copies.

    Raises:
        ValueError: `causal`.
    """

    model_type = "duo"
    original_class: ClassVar[str | None] = "DUO"
    subs: ClassVar[bool] = False
    time_conditioning: bool = True
    causal: bool = False
    var_min: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the options."""
        super().__post_init__(**kwargs)
        if self.causal:
            raise ValueError(
                "Duo config has causal=True, an AR model of the paper's comparison; only False is implemented"
            )


class DuoForDiffusion(DiTForMaskedLM):
    """A DiT that predicts every position of the canvas; parity with the original: tests/adapters/test_duo.py."""

    config_class = DuoConfig


FAMILY = Family(
    name="duo",
    layouts={"duo": (DuoConfig, DuoForDiffusion)},
    samplers={"duo": DUO_SAMPLER, "duo_psi": PSI_SAMPLER},
    has_mask_token=False,
    hub_names=("s-sahoo/duo", "s-sahoo/duo-distilled"),
    special_ids={50258: {"bos": 50256, "eos": 50256, "pad": 50257}},
    pad_token="[PAD]",
    tokenizers=TOKENIZERS,
    **TENSOR_NAMES,
)
