"""DiffuGPT and DiffuLLaMA (2410.17891): GPT-2 and Llama without causality; output i - 1 predicts position i."""

from typing import Any, ClassVar

from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from dlm_lens.adapters.masked_diffusion import DIFFUGPT_SAMPLER, MaskedDiffusionFields, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family
from dlm_lens.attention.cache_argument import CURRENT, OLD

FIXED = ("add_cross_attention", "reorder_and_upcast_attn")
"""Options of GPT2Config that are other networks, in which hook points would not see the attention."""


class DiffuGPTConfig(MaskedDiffusionFields, GPT2Config):
    """Config of DiffuGPT: GPT-2's fields, and those of a masked DLM.

    Raises:
        ValueError: an option of `FIXED` is on.
    """

    model_type = "diffugpt"
    original_architecture: ClassVar[str] = "DlmLensGPT2"
    attribute_map: ClassVar[dict[str, str]] = {**GPT2Config.attribute_map, "intermediate_size": "n_inner"}
    logit_shift: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Write the width of the MLP out; queries, keys and values have as many heads."""
        kwargs.pop("num_key_value_heads", None)
        for name in FIXED:
            if getattr(self, name):
                raise ValueError(f"DiffuGPT config has {name}=True; only False is implemented")
        super().__post_init__(**kwargs)
        host: Any = self
        host.n_inner = 4 * host.n_embd if host.n_inner is None else host.n_inner

    @property
    def empty_prompt(self) -> list[int] | None:
        """What stands for an empty prompt: the start of a text."""
        return None if self.bos_token_id is None else [self.bos_token_id]


class _OwnInitialisation:
    """Mixin before a class of transformers."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: transformers leaves out GPT-2's own initialisation of whole modules in classes of others."""
        return False


class DiffuGPTDecoder(_OwnInitialisation, GPT2Model):
    """GPT-2's layers, whose attention modules say where queries and keys are in the output of `c_attn`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.h:
            # Its columns are those of all queries, then of all keys, then of all values.
            layer.attn.fused_projections = {"q": ("c_attn", 0), "k": ("c_attn", config.hidden_size)}

    def warn_if_padding_and_no_attention_mask(self, input_ids: Any, attention_mask: Any) -> None:
        """No look at the ids: a canvas may hold the padding's token as content, and padding comes with a mask."""


class _CausalSignature(_OwnInitialisation, GPT2LMHeadModel):
    """GPT-2 with the output of a causal LM, which the mixin takes."""

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """The host's output without the fields of cross attention, which the network has not."""
        if OLD in kwargs:
            kwargs[CURRENT] = kwargs.pop(OLD)
        output = super().forward(*args, **kwargs)
        names = ("logits", CURRENT, "hidden_states", "attentions")
        return CausalLMOutputWithPast(**{name: getattr(output, name) for name in names})


class DiffuGPTModel(MaskedDiffusionMixin, _CausalSignature):
    """DiffuGPT; parity: tests/adapters/test_diffugpt.py. Its logits are not shifted, its loss is."""

    config_class = DiffuGPTConfig
    decoder_class = DiffuGPTDecoder


class DiffuLlamaConfig(MaskedDiffusionFields, LlamaConfig):
    """Config of DiffuLLaMA."""

    model_type = "diffullama"
    original_architecture: ClassVar[str] = "DlmLensLlama"
    logit_shift: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the temperature of the authors' script for DiffuLLaMA."""
        super().__post_init__(**kwargs)
        self.sampler_defaults = {"temperature": 0.9, **(self.sampler_defaults or {})}

    @property
    def empty_prompt(self) -> list[int] | None:
        """What stands for an empty prompt: the start of a text."""
        return None if self.bos_token_id is None else [self.bos_token_id]


class DiffuLlamaModel(MaskedDiffusionMixin, LlamaForCausalLM):
    """DiffuLLaMA, with the names of Llama's weights."""

    config_class = DiffuLlamaConfig


FAMILY = Family(
    name="diffugpt",
    layouts={"diffugpt": (DiffuGPTConfig, DiffuGPTModel), "diffullama": (DiffuLlamaConfig, DiffuLlamaModel)},
    samplers={"diffugpt": DIFFUGPT_SAMPLER},
    hub_names=("diffusionfamily/diffugpt-s", "diffusionfamily/diffugpt-m", "diffusionfamily/diffullama"),
    # Their config.json is GPT-2's and Llama's.
    adapted={"gpt2": "diffugpt", "llama": "diffullama"},
    adapted_tensors=r"^denoise_model\.",
    architectures={"DiscreteDiffusionModel": "diffugpt"},
    # Ordinary tokens of GPT-2 and Llama 2, but in the medium model, whose tokenizer has one more (LLaMA-Factory's
    # model/loader.py in HKUNLP/DiffuLLaMA).
    special_ids={50257: {"mask": 10541}, 50258: {"mask": 50257}, 32000: {"mask": 811}},
    rows_of_tokenizer=("diffugpt",),
    renames_of_types={
        "diffugpt": ((r"^denoise_model\.", "transformer."), (r"^embed_tokens\.", "transformer.wte.")),
    },
)
