"""Fast-dLLM v2: Qwen2.5 as block diffusion, whose output at i - 1 predicts position i."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family
from dlm_lens.attention import additive_mask, own_blocks
from dlm_lens.attention.cache_argument import CURRENT, NEW

SAMPLER = {
    "gen_length": 128,
    "block_length": 32,
    "sub_block_length": 8,
    "threshold": 1.0,
    "temperature": 0.0,
    "top_p": 0.95,
}
"""The defaults of the original `generate`; gen_length is ours. Its evaluation has the threshold 0.9."""


class FastDllmV2Config(MaskedDiffusionFields, Qwen2Config):
    """Config of Fast-dLLM v2: Qwen2's fields, and the length of the blocks.

    Args:
        bd_size: positions of a block, counted from the text's first token.

    Raises:
        ValueError: bd_size is not a whole number of at least 1.
    """

    model_type = "Fast_dLLM_Qwen"
    original_class: ClassVar[str | None] = "Fast_dLLM_QwenForCausalLM"
    original_architecture: ClassVar[str] = "DlmLensQwen2"
    logit_shift: bool = True
    bd_size: int = 32

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the length of the blocks."""
        if isinstance(self.bd_size, bool) or not isinstance(self.bd_size, int) or self.bd_size < 1:
            raise ValueError(f"bd_size is {self.bd_size!r}; the length of a block is a whole number of at least 1")
        super().__post_init__(**kwargs)

    @property
    def trained_block_length(self) -> int:
        """The block length of the training."""
        return self.bd_size

    @property
    def block_causal_length(self) -> int:
        """The length of the blocks of every forward pass."""
        return self.bd_size


class FastDllmV2Decoder(Qwen2Model):
    """Qwen2's decoder, which sees its own and earlier blocks; a mask [batch, 1, query, key] is taken as it is."""

    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The states; a mask [batch, position] is 1 for content and covers the cached positions too.

        With a cache the queries follow the cached positions.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        past_key_values = kwargs.pop(NEW, past_key_values)
        whole = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4)
        if given is not None and not whole:
            attention_mask = {"full_attention": self._blocks(given, attention_mask, past_key_values)}
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CURRENT: past_key_values},
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _blocks(self, given: Tensor, mask: Tensor | None, cache: Any) -> Float[Tensor, "batch 1 query key"]:
        cached = 0 if cache is None else cache.get_seq_length()
        content = torch.ones(len(given), cached + given.shape[1], dtype=torch.bool, device=given.device)
        content = content if mask is None else mask.bool()
        layout = own_blocks(self.config, content)
        assert layout is not None
        visible = layout.visible(content)
        # As in the other families, queries of padding see the content, so that their states are finite.
        visible = (visible | (content[:, None, None, :] & ~content[:, None, :, None]))[:, :, cached:]
        return additive_mask(visible, self.dtype)


class FastDllmV2Model(MaskedDiffusionMixin, Qwen2ForCausalLM):
    """Fast-dLLM v2; parity with the original: tests/adapters/test_fast_dllm_v2.py. Its logits are not shifted."""

    config_class = FastDllmV2Config
    decoder_class = FastDllmV2Decoder


FAMILY = Family(
    name="fast_dllm_v2",
    layouts={"Fast_dLLM_Qwen": (FastDllmV2Config, FastDllmV2Model)},
    samplers={"fast_dllm_v2": SAMPLER},
    hub_names=("Efficient-Large-Model/Fast_dLLM_v2_7B", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
    # |<MASK>| is the first id that Qwen2.5's tokenizer leaves free. The 7B has 152064 rows, the 1.5B has 151936.
    special_ids={152064: {"mask": 151665, "eos": 151645}, 151936: {"mask": 151665, "eos": 151645}},
)
