"""SDLM: Qwen2.5 layers under causal attention, but for a window of masks that sees itself in both directions."""

from typing import Any, ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin, MaskOrderedDecoder
from dlm_lens.adapters.registry import Family

SAMPLER = {"gen_length": 128, "window_length": 4, "threshold": 0.9, "temperature": 0.0}
"""The defaults of the authors' `SDLM_generate`; gen_length is ours (theirs is 1,024)."""


class SDLMConfig(MaskedDiffusionFields, Qwen2Config):
    """Config of SDLM: Qwen2's fields, and the length of the window of its training.

    Args:
        block_size: D, positions of the window: the last token and D - 1 masks.
        text_mask_token_id: the authors' name of `mask_token_id`.
        causal_attn: the window attends causally too; not supported, as in every released checkpoint.

    Raises:
        ValueError: a causal window, or one of a single position.
    """

    model_type = "sdlm"
    original_architecture: ClassVar[str] = "DlmLensQwen2"
    logit_shift: bool = True
    block_size: int = 4
    text_mask_token_id: int | None = None
    causal_attn: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the window; the authors' attention ignores Qwen2's sliding windows."""
        if self.causal_attn:
            raise ValueError(
                "causal_attn is True; released SDLMs see their window in both directions, and only that is here"
            )
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; the window is the last token and at least one mask")
        self.use_sliding_window, self.layer_types = False, None
        if self.mask_token_id is None:
            self.mask_token_id = self.text_mask_token_id
        super().__post_init__(**kwargs)

    @property
    def mask_window(self) -> int:
        """The window of every forward pass to which no mask [query, key] is given."""
        return self.block_size


class SDLMDecoder(MaskOrderedDecoder, Qwen2Model):
    """Qwen2's layers, whose attention is that of `attention.sees_window`."""


class SDLMModel(MaskedDiffusionMixin, Qwen2ForCausalLM):
    """SDLM; parity with the original: tests/adapters/test_sdlm.py. Its logits are not shifted."""

    config_class = SDLMConfig
    decoder_class = SDLMDecoder


_IDS = {"mask": 151665, "eos": 151643, "eot": 151645}

FAMILY = Family(
    name="sdlm",
    layouts={"sdlm": (SDLMConfig, SDLMModel)},
    samplers={"sdlm": SAMPLER},
    hub_names=("OpenGVLab/SDLM-3B-D4", "OpenGVLab/SDLM-3B-D8", "OpenGVLab/SDLM-32B-D4"),
    # The authors' training starts from Qwen2.5 and keeps its names.
    adapted={"qwen2": "sdlm"},
    adapted_field="text_mask_token_id",
    # The newest generator's default, <mask>, where config.json has no text_mask_token_id.
    special_ids={151936: _IDS, 152064: _IDS},
)
