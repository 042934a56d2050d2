"""Nemotron-Labs-Diffusion: Ministral 3 layers as a masked DLM whose finished text is attended to causally."""

from typing import Any, ClassVar

from transformers import Ministral3Config, Ministral3ForCausalLM

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 128, "block_length": 32, "threshold": 0.9, "temperature": 0.0}
"""The settings of the authors' chat_dlm.py; gen_length is ours (theirs is 512)."""

PARADIGMS = ("bidirectional", "block_diff")
"""Values of `dlm_paradigm` with the same forward pass without labels; "block_diff" is that of the training."""


class NemotronLabsDiffusionConfig(MaskedDiffusionFields, Ministral3Config):
    """Config of Nemotron-Labs-Diffusion: Ministral 3's fields, and the length of the blocks of its training.

    Args:
        block_size: positions of a block in the training.
        dlm_paradigm: "bidirectional" or "block_diff"; "autoregressive" is the model type of the family `causal`.
        attention_bias: of the projections of attention; not supported, as in every released checkpoint.
        mlp_bias: of the MLP; likewise.

    Raises:
        ValueError: another paradigm, or biases.
    """

    model_type = "nemotron_labs_diffusion"
    original_architecture: ClassVar[str] = "DlmLensLlama"
    causal_context: ClassVar[bool] = True
    block_size: int = 32
    dlm_paradigm: str = "bidirectional"
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check that the layers and the attention are those of the released checkpoints."""
        if self.dlm_paradigm not in PARADIGMS:
            raise ValueError(
                f"dlm_paradigm is {self.dlm_paradigm!r}; this family has {' and '.join(PARADIGMS)}: load the "
                'checkpoint with family="causal" for its autoregressive reading'
            )
        if self.attention_bias or self.mlp_bias:
            raise ValueError(
                f"attention_bias is {self.attention_bias} and mlp_bias {self.mlp_bias}; Ministral 3's layers have "
                "no biases, and no released checkpoint of Nemotron-Labs-Diffusion has any"
            )
        super().__post_init__(**kwargs)
        self.sliding_window = None  # null in released checkpoints, and not used where the authors' code denoises

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.block_size


class NemotronLabsDiffusionModel(MaskedDiffusionMixin, Ministral3ForCausalLM):
    """Ministral 3 layers whose plain pass sees the whole canvas; `denoise` gives them the mask of each step.

    Parity with the original: tests/adapters/test_nemotron_labs_diffusion.py.
    """

    config_class = NemotronLabsDiffusionConfig


class NemotronLabsDiffusionARConfig(Ministral3Config):
    """Config of the same weights read as an autoregressive model (the authors' `ar_generate`)."""

    model_type = "nemotron_labs_diffusion_ar"
    original_architecture: ClassVar[str] = "DlmLensLlama"


class NemotronLabsDiffusionARModel(Ministral3ForCausalLM):
    """The same layers under causal attention: the output at i - 1 predicts position i."""

    config_class = NemotronLabsDiffusionARConfig


RENAMES = ((r"^encoder\.", "model."), (r"^diffusion_head\.", "lm_head."))
"""From the names of the tensors of a checkpoint to those of the host."""

_VLM = (
    "a Nemotron-Labs-Diffusion with images, whose layers are not here; take "
    "nvidia/Nemotron-Labs-Diffusion-3B, -8B or -14B"
)

FAMILY = Family(
    name="nemotron_labs_diffusion",
    layouts={"nemotron_labs_diffusion": (NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel)},
    # The second one is `generate` with causal_context=False.
    samplers={"nemotron_labs_diffusion": SAMPLER, "efficient_dlm": SAMPLER},
    hub_names=(
        "nvidia/Nemotron-Labs-Diffusion-3B",
        "nvidia/Nemotron-Labs-Diffusion-3B-Base",
        "nvidia/Nemotron-Labs-Diffusion-8B",
        "nvidia/Nemotron-Labs-Diffusion-8B-Base",
        "nvidia/Nemotron-Labs-Diffusion-14B",
        "nvidia/Nemotron-Labs-Diffusion-14B-Base",
    ),
    refused={"nemotron_labs_diffusion_vlm": _VLM, "NemotronLabsDiffusionVLMModel": _VLM},
    # config.json has every id; these are for configs without them.
    special_ids={131072: {"mask": 100, "eos": 11}},
    renames=RENAMES,
)
