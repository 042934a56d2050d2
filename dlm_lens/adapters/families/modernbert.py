"""ModernBERT as a masked DLM: dllm's chat models, with transformers' layers and the names of the originals."""

from typing import Any

from torch import Tensor
from transformers import ModernBertConfig
from transformers import ModernBertForMaskedLM as Encoder
from transformers.modeling_outputs import CausalLMOutputWithPast

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.masked_diffusion import DLLM_SAMPLER, MaskedDiffusionMixin
from dlm_lens.adapters.registry import Family


class MaskedModernBertConfig(ModernBertConfig):
    """Config of ModernBERT, and the fields of a masked DLM.

    dllm fills the rows of its training up with [PAD], so that texts end with it; config.json names [SEP] alone.
    """

    model_type = "modernbert"
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Let [PAD] end texts, and derive what the host derives; queries, keys and values have as many heads."""
        kwargs.pop("num_key_value_heads", None)
        super().__post_init__(**without_foreign_fields(kwargs))
        host: Any = self
        ends = host.eos_token_id if isinstance(host.eos_token_id, list) else [host.eos_token_id]
        if host.pad_token_id is not None and host.pad_token_id not in ends:
            host.eos_token_id = [end for end in (*ends, host.pad_token_id) if end is not None]


class _CausalSignature(Encoder):
    """ModernBERT's network with the arguments and the output of a causal LM, which the mixin calls."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        width = config.hidden_size
        for layer in self.model.layers:
            # Its rows are those of all queries, then of all keys, then of all values.
            layer.attn.fused_projections = {"q": ("Wqkv", 0), "k": ("Wqkv", width)}

    def forward(
        self,
        *args: Any,
        past_key_values: None = None,
        cache: None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The host's output, with the logits of the last `logits_to_keep` positions (0: all)."""
        output = super().forward(*args, **kwargs)
        logits = output.logits
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


class ModernBertForMaskedLM(MaskedDiffusionMixin, _CausalSignature):
    """ModernBERT under the name that its checkpoints have; parity: tests/adapters/test_modernbert.py."""

    config_class = MaskedModernBertConfig

    @property
    def prediction_head(self) -> Any:
        """What states pass between the final norm and the output embedding."""
        return self.head

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: transformers leaves out ModernBERT's own initialisation of whole modules in classes of others."""
        return False

    def get_decoder(self) -> Any:
        """The network without the head; `decoder` is the host's name of the output embedding."""
        return self.model


FAMILY = Family(
    name="modernbert",
    layouts={"modernbert": (MaskedModernBertConfig, ModernBertForMaskedLM)},
    samplers={"dllm": {**DLLM_SAMPLER, "block_length": 32}},
    hub_names=("dllm-hub/ModernBERT-base-chat-v0.1", "dllm-hub/ModernBERT-large-chat-v0.1"),
    special_ids={50368: {"mask": 50284}},
    text_options={"add_special_tokens": False},
    tiny={"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": None, "sep_token_id": None},
)
