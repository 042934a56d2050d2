"""SMDM: Llama layers without causality, under lit_gpt's config and checkpoint names, with sink tokens and gates."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.core_model_loading import ConversionOps, WeightConverter

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.float32_parts import Float32RotaryEmbedding, use_weighted_norms
from dlm_lens.adapters.masked_diffusion import SMDM_SAMPLER
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.adapters.registry import Family, Shapes, WeightsOnly
from dlm_lens.adapters.sink_tokens import SinkDecoder, SinkMaskedDiffusion
from dlm_lens.attention import Placement, SinkLayout


class SplitGroups(ConversionOps):
    """The fused projection, whose rows are (group, [its queries, key, value], d_head), as q, k and v."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One tensor to three."""
        config = kwargs["config"]
        (fused,) = _tensors(input_dict)
        groups = fused.view(config.num_key_value_heads, -1, config.head_dim, fused.shape[-1])
        queries = groups.shape[1] - 2
        parts = groups.split([queries, 1, 1], 1)
        return {name: part.flatten(0, 2).contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving."""
        return FuseGroups()


class FuseGroups(ConversionOps):
    """q, k and v as the fused, interleaved projection."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Three tensors to one."""
        config = kwargs["config"]
        parts = [
            part.view(config.num_key_value_heads, -1, config.head_dim, part.shape[-1])
            for part in _tensors({name: input_dict[name] for name in source_patterns})
        ]
        return {target_patterns[0]: torch.cat(parts, 1).flatten(0, 2)}

    @property
    def reverse_op(self) -> ConversionOps:
        """For loading."""
        return SplitGroups()


class SplitSinks(ConversionOps):
    """The embedding's rows as token rows and sink rows; without sinks there is nothing to split."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One tensor to one or two."""
        config = kwargs["config"]
        (rows,) = _tensors(input_dict)
        if not config.num_sinks:
            return {target_patterns[0]: rows}
        parts = rows[: config.embedding_rows].contiguous(), rows[config.embedding_rows :].contiguous()
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """For saving."""
        return JoinSinks()


class JoinSinks(ConversionOps):
    """Token rows and sink rows as one embedding."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """One or two tensors to one."""
        held = {name: input_dict[name] for name in source_patterns if name in input_dict}
        return {target_patterns[0]: torch.cat(_tensors(held))}

    @property
    def reverse_op(self) -> ConversionOps:
        """For loading."""
        return SplitSinks()


def _tensors(held: Mapping[str, Any]) -> list[Tensor]:
    return [value[0] if isinstance(value, list) else value for value in held.values()]


LIT_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_key_value_heads",
    "n_layer": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Fields of lit_gpt's Config -> the names of LlamaConfig; intermediate_size has the same."""

FIXED: dict[str, tuple[Any, ...]] = {
    "bias": (False,),
    "condense_ratio": (1,),
    "parallel_residual": (False,),
    "rotary_percentage": (1.0,),
    "shared_attention_norm": (False,),
    "_mlp_class": ("LLaMAMLP",),
    "_norm_class": ("FusedRMSNorm", "RMSNorm"),
}
"""Options of lit_gpt's Config that no SMDM varies; another value is another architecture."""

_COMMON = {"vocab_size": 32000, "padded_vocab_size": 32000, "block_size": 2048, "norm_eps": 1e-5}
SIZES = {
    "472M": {**_COMMON, "n_layer": 18, "n_embd": 1280, "n_head": 10, "intermediate_size": 5120},
    "1028M": {**_COMMON, "n_layer": 20, "n_embd": 1792, "n_head": 14, "intermediate_size": 7168},
}
"""Released models; other sizes are described in a JSON file beside the weights."""


@strict  # so that transformers calls the `validate_token_ids` of this class
class SMDMConfig(OriginalFields, LlamaConfig):
    """Config of SMDM: accepts the fields of lit_gpt's Config and writes them back beside Llama's names.

    The logits have `vocab_size` columns (lit_gpt's padded_vocab_size); the embedding has one row more, for the
    mask, which can therefore never be predicted. In the published sink format the sinks are the rows after it.

    Args:
        num_sinks: learned sink tokens around the canvas (published: 0 or 1).
        sink_placement: "front", as published, or "end".
        zero_sink_value: force the sinks' values to zero in every layer.
        gated_attention: z times sigmoid(W_g x), elementwise, before the output projection.
        sampler_defaults: settings of `denoise` that are stored in the checkpoint.

    Raises:
        ValueError: an option of lit_gpt's Config that SMDM does not have, another mask token, or an impossible
            sink layout.
    """

    model_type = "smdm"
    original_names: ClassVar[Mapping[str, str]] = LIT_NAMES
    original_options: ClassVar[Mapping[str, Any]] = {name: values[0] for name, values in FIXED.items()}
    original_architecture: ClassVar[str] = "DlmLensLlama"
    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    rms_norm_eps: float = 1e-5  # lit_gpt's, where the file has none; Llama's is 1e-6
    num_sinks: int = 0
    sink_placement: str = "front"  # strict's own error for a Literal is no sentence
    zero_sink_value: bool = False
    gated_attention: bool = False
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take lit_gpt's names before the parent derives head_dim and the rotary parameters from them."""
        for name, allowed in FIXED.items():
            given = kwargs.pop(name, None)
            if given is not None and given not in allowed:
                known = " or ".join(repr(value) for value in allowed)
                raise ValueError(f"SMDM config has {name}={given!r}; only {known} is implemented")
        multiple = kwargs.pop("padding_multiple", None)
        if kwargs.get("padded_vocab_size") is None and multiple:
            kwargs["padded_vocab_size"] = -(-self.vocab_size // multiple) * multiple
        if "n_head" in kwargs and kwargs.get("n_query_groups") is None:
            kwargs["n_query_groups"] = kwargs["n_head"]
        self.take_original_names(kwargs)
        for name in ("org", "name"):
            kwargs.pop(name, None)
        if self.mask_token_id not in (None, self.vocab_size):
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; an SMDM's mask is the row after its vocabulary, "
                f"{self.vocab_size}: leave mask_token_id out"
            )
        self.mask_token_id = self.vocab_size
        SinkLayout(self.num_sinks, cast(Placement, self.sink_placement))
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache = False

    @property
    def embedding_rows(self) -> int:
        """Rows of the token embedding: the vocabulary and the mask."""
        return self.vocab_size + 1

    def validate_token_ids(self) -> None:
        """No check: transformers would warn that the mask id equals `vocab_size`, as it does in every SMDM."""


class RoundedRotaryEmbedding(Float32RotaryEmbedding):
    """Rotary tables rounded to bfloat16 whatever the model's dtype, in which SMDM was trained.

    They come as float32, so that the products are computed there, as the reference's kernel does.
    """

    def forward(
        self, x: Tensor, position_ids: Int[Tensor, "#batch position"]
    ) -> tuple[Float[Tensor, "#batch position d_head"], Float[Tensor, "#batch position d_head"]]:
        """Return cos and sin in float32, with the values that bfloat16 can hold."""
        cos, sin = super().forward(x, position_ids)
        return cos.bfloat16().float(), sin.bfloat16().float()


class SMDMModel(SinkDecoder, LlamaModel):
    """Llama's decoder with SMDM's rotary tables, norms and embedding rows, and sinks around the canvas."""

    def __init__(self, config: SMDMConfig) -> None:
        super().__init__(config)
        self.rotary_emb = RoundedRotaryEmbedding(config)
        use_weighted_norms(self)


class SMDMForMaskedLM(SinkMaskedDiffusion, LlamaForCausalLM):
    """SMDM and its sink-token and gated variants; parity with the originals: tests/adapters/test_smdm.py."""

    config_class = SMDMConfig
    decoder_class = SMDMModel


_WTE, _HEAD, _QKV, _W1, _GATE = (
    "transformer.wte.weight",
    "lm_head.weight",
    "transformer.h.0.attn.attn.weight",
    "transformer.h.0.mlp.swiglu.w1.weight",
    "transformer.h.0.attn.gate.weight",
)


def recognise(shapes: Shapes) -> bool:
    """Whether these are SMDM's tensors."""
    return all(len(shapes.get(name, ())) == 2 for name in (_WTE, _HEAD, _QKV, _W1))


def complete(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Config values with the sink token, seen from the embedding's rows, and the gate, seen from its key.

    Raises:
        ValueError: the values describe another network than the tensors.
    """
    config = SMDMConfig(**values)
    seen = {
        "n_layer": len({name.split(".")[2] for name in shapes if name.startswith("transformer.h.")}),
        "n_embd": shapes[_WTE][1],
        "intermediate_size": shapes[_W1][0],
        "padded_vocab_size": shapes[_HEAD][0],
        "rows of the fused projection": shapes[_QKV][0],
    }
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    described = {name: getattr(config, LIT_NAMES.get(name, name), heads * config.head_dim) for name in seen}
    wrong = [
        f"{name} {described[name]} (the weights: {seen[name]})" for name in seen if described[name] != seen[name]
    ]
    if wrong:
        raise ValueError(f"size or JSON file describe another model than the weights: {', '.join(wrong)}")
    sinks = shapes[_WTE][0] - config.embedding_rows
    if sinks not in (0, 1):
        raise ValueError(
            f"{_WTE} has {shapes[_WTE][0]} rows for a vocabulary of {config.vocab_size}; an SMDM has 1 more (the "
            "mask) or 2 more (mask and sink token)"
        )
    return {**values, "num_sinks": sinks, "gated_attention": _GATE in shapes}


_NAMES = {
    r"transformer\.h": "model.layers",
    r"transformer\.ln_f": "model.norm",
    "norm_1": "input_layernorm",
    r"attn\.proj": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    r"mlp\.swiglu\.w1": "mlp.gate_proj",
    r"mlp\.swiglu\.w2": "mlp.up_proj",
    r"mlp\.swiglu\.w3": "mlp.down_proj",
}

FAMILY = Family(
    name="smdm",
    layouts={"smdm": (SMDMConfig, SMDMForMaskedLM)},
    samplers={"smdm": SMDM_SAMPLER},
    hub_names=(
        "nieshen/SMDM/mdm_safetensors/mdm-472M-100e18.safetensors",
        "nieshen/SMDM/mdm_safetensors/mdm-1028M-1600e18.safetensors",
    ),
    special_ids={32000: {"mask": 32000, "eos": 2}},
    renames=tuple(_NAMES.items()),
    renames_of_options=((r"attn\.gate", "self_attn.gate_proj"),),
    conversions=(
        WeightConverter(
            ["attn.attn.weight"],
            [f"self_attn.{name}_proj.weight" for name in "qkv"],
            [SplitGroups()],
        ),
        WeightConverter(
            ["transformer.wte.weight"], ["model.embed_tokens.weight", "model.embed_tokens.sinks"], [SplitSinks()]
        ),
    ),
    weights_only=WeightsOnly("smdm", recognise, SIZES, complete),
)
