"""DiT: the network of MDLM, BD3-LM, SEDD and Duo: transformer layers whose norms are modulated by the noise level.

A layer (kuleshov-group/mdlm, models/dit.py; adaptive layer norm of 2212.09748, section 3.2), with six vectors
(shift, scale, gate, shift, scale, gate) = W silu(cond) + b of each layer:

    x = x + gate * attention(norm(x) (1 + scale) + shift)
    x = x + gate * mlp(norm(x) (1 + scale) + shift)

The attention is Llama's, without causality, and the MLP Phi's (GELU, with biases). Checkpoints fuse q, k and v.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionMixin
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.attention.cache_argument import CURRENT, NEW

HUB_NAMES = {
    "hidden_dim": "hidden_size",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "model_length": "max_position_embeddings",
}
"""Fields of the original config.json -> the names of LlamaConfig."""

FREQUENCIES = 256
"""Width of the sinusoids of the noise level."""

NOISE_EPS = 1e-3
"""The share of tokens that the log-linear schedule leaves unmasked at t = 1."""


def sigma_of(masked: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The noise level sigma = -ln(1 - m) at which a share m of the tokens is masked, or random.

    At time t of the log-linear schedule m = (1 - 1e-3) t (2406.07524, appendix E.1).
    """
    return -torch.log1p(-masked)


def takes_noise_level(model: Any) -> bool:
    """Whether a network is given the noise level: a DiT with `time_conditioning`."""
    return bool(getattr(model.config, "time_conditioning", False))


class DiTConfig(OriginalFields, LlamaConfig):
    """Config of a DiT: accepts the original config.json and writes it back beside Llama's names.

    [MASK] is the last row of the embedding unless `mask_token_id` says otherwise; a network of uniform noise
    (without `subs`) has none. The MLP has four times the width.

    Args:
        cond_dim: width of the condition, the embedding of the noise level.
        dropout: of what attention and MLP add, in training.
        time_conditioning: whether the network is given the noise level; without, it is given 0 at every step.
        adaln: whether norms are modulated at all.
        sampler: the sampling algorithm, where it is not the family's first.
        sampler_defaults: settings of `denoise` that are stored in the checkpoint.
    """

    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    }
    original_names: ClassVar[Mapping[str, str]] = HUB_NAMES
    subs: ClassVar[bool] = True  # [MASK] has no probability (SUBS); its logit counts nowhere
    is_causal: bool = False
    vocab_size: int = 50258
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 0  # 0: four times hidden_size
    max_position_embeddings: int = 1024
    hidden_act: str = "gelu_pytorch_tanh"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    cond_dim: int = 128
    dropout: float = 0.1
    time_conditioning: bool = False
    adaln: bool = True
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the original names before the parent derives head_dim and the rotary parameters from them."""
        self.take_original_names(kwargs)
        self.num_key_value_heads = self.num_attention_heads  # q, k and v are one projection of equal thirds
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        if self.mask_token_id is None and self.subs:
            self.mask_token_id = self.vocab_size - 1
        super().__post_init__(**without_foreign_fields(kwargs))
        self.use_cache = False

    @property
    def empty_prompt(self) -> list[int] | None:
        """The ids that an empty prompt stands for: the model writes without any."""
        return []

    def level_of(self, masked: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """What the network is given where a share of the tokens is masked: sigma of the log-linear schedule."""
        return sigma_of((1 - NOISE_EPS) * masked)


class NoiseEmbedding(nn.Module):
    """The condition: silu of a two-layer MLP of 128 cosines and 128 sines of sigma."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FREQUENCIES, config.cond_dim)
        self.fc2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, sigma: Float[Tensor, "batch"]) -> Float[Tensor, "batch d_cond"]:
        """Return silu(W_2 silu(W_1 [cos(sigma f), sin(sigma f)])), f_i = 10000^(-i / 128)."""
        half = FREQUENCIES // 2
        index = torch.arange(half, device=sigma.device, dtype=torch.float32)
        angle = sigma.float()[:, None] * torch.exp(-math.log(10000) / half * index)
        waves = torch.cat([angle.cos(), angle.sin()], -1).to(self.fc1.weight.dtype)
        condition: Tensor = nn.functional.silu(self.fc2(nn.functional.silu(self.fc1(waves))))
        return condition


class DiTLayerNorm(nn.Module):
    """Layer norm without a bias, computed in float32 whatever the model's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return (x - mean) / sqrt(variance + 1e-5) * weight."""
        normed = nn.functional.layer_norm(x.float(), self.weight.shape, eps=1e-5)
        return (normed * self.weight.float()).to(x.dtype)


class Gate(nn.Module):
    """What a layer adds to the residual stream: gate * (the output of attention or MLP)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, added: Float[Tensor, "batch position d_model"], gate: Float[Tensor, "#batch 1 d_model"] | None
    ) -> Float[Tensor, "batch position d_model"]:
        """Return the product; `gate` is None in a network without modulation."""
        added = nn.functional.dropout(added, self.dropout, self.training)
        return added if gate is None else gate * added


def modulated(
    x: Float[Tensor, "*batch d_model"], shift: Tensor | None, scale: Tensor | None
) -> Float[Tensor, "*batch d_model"]:
    """X (1 + scale) + shift; x itself in a network without modulation."""
    return x if shift is None or scale is None else x * (1 + scale) + shift


class DiTLayer(GradientCheckpointingLayer):
    """A layer whose norms and outputs are modulated.

    The output of `modulation` is [batch, 6 d_model]: shift, scale and gate of attention, then those of the MLP; a
    hook on it sees and may replace them. `attention_gate` and `mlp_gate` return what is added to the residual
    stream, `self_attn` and `mlp` what the gates multiply.
    """

    def __init__(self, config: DiTConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = DiTLayerNorm(config.hidden_size), DiTLayerNorm(config.hidden_size)
        self.self_attn, self.mlp = LlamaAttention(config, layer_idx), PhiMLP(config)
        self.attention_gate, self.mlp_gate = Gate(config.dropout), Gate(config.dropout)
        self.modulation = nn.Linear(config.cond_dim, 6 * config.hidden_size) if config.adaln else None

    def forward(
        self,
        hidden_states: Float[Tensor, "batch position d_model"],
        condition: Float[Tensor, "#batch d_cond"] | None = None,  # positional, for gradient checkpointing
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "batch position d_model"]:
        """Return the residual stream after the layer."""
        vectors: Any = (None,) * 6
        if self.modulation is not None:
            vectors = self.modulation(condition)[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = vectors
        attended, _ = self.self_attn(
            hidden_states=modulated(self.norm1(hidden_states), shift, scale),
            attention_mask=attention_mask,
            **kwargs,
        )
        hidden_states = hidden_states + self.attention_gate(attended, gate)
        mixed = self.mlp(modulated(self.norm2(hidden_states), mlp_shift, mlp_scale))
        return cast(Tensor, hidden_states + self.mlp_gate(mixed, mlp_gate))


class DiTFinalNorm(nn.Module):
    """The norm before the head, and its modulation.

    Without time conditioning the condition is the same in every pass, and a lens may apply this norm to any state;
    with it, a lens gives the noise level of the step that it reads.
    """

    def __init__(self, config: DiTConfig, embedding: NoiseEmbedding | None) -> None:
        super().__init__()
        self.norm_final = DiTLayerNorm(config.hidden_size)
        self.modulation = nn.Linear(config.cond_dim, 2 * config.hidden_size) if config.adaln else None
        self.conditioned = config.time_conditioning
        # In a list: a module set as an attribute would become a child, and be saved twice.
        self.embedding = [] if embedding is None else [embedding]

    def forward(
        self,
        x: Float[Tensor, "*batch d_model"],
        condition: Float[Tensor, "#batch d_cond"] | None = None,
        *,
        sigma: float | None = None,
    ) -> Float[Tensor, "*batch d_model"]:
        """Return the inputs of the head.

        Args:
            x: states after the last layer.
            condition: the embedded noise level of every row, in a pass.
            sigma: the noise level of all states, outside a pass; of no effect without time conditioning.

        Raises:
            ValueError: neither, in a network that is given the noise level.
        """
        if self.modulation is None:
            return cast(Tensor, self.norm_final(x))
        if condition is not None:
            shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
            return modulated(self.norm_final(x), shift, scale)
        if self.conditioned and sigma is None:
            raise ValueError(
                "the network is given the noise level (time_conditioning), on which its last norm depends: a lens "
                "has none to give; read logits of whole passes instead, or the lens of a run (dlm_lens.logit_lens)"
            )
        level = float(sigma or 0.0) if self.conditioned else 0.0
        constant = self.embedding[0](torch.full((1,), level, dtype=torch.float32, device=x.device))
        shift, scale = self.modulation(constant)[0].chunk(2, -1)
        return modulated(self.norm_final(x), shift, scale)


class DiTModel(LlamaModel):
    """The decoder: embedding, layers, final norm. `block_causal_length` makes its attention block causal.

    Without `sigma` a network that is given the noise level takes the one at which as many tokens are masked as a
    row has; one of uniform noise takes what it sees as text without noise, sigma = 0.
    """

    _no_split_modules: ClassVar[list[str]] = ["DiTLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": DiTLayer, "attentions": LlamaAttention}

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.sigma_map = NoiseEmbedding(config) if config.adaln else None
        self.layers = nn.ModuleList([DiTLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = DiTFinalNorm(config, self.sigma_map)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        use_cache: bool | None = None,
        sigma: Float[Tensor, "batch"] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """States after the final norm and its modulation.

        Args:
            input_ids: of the canvas.
            attention_mask: 1 for content, 0 for padding; or [batch, 1, query, key], which is taken as it is.
            position_ids: of the rotation; by default from 0, after what is cached.
            past_key_values: keys and values of positions before.
            inputs_embeds: instead of ids.
            use_cache: keep keys and values.
            sigma: the noise level of every row, -ln(1 - m) where a share m of the tokens is masked, or random; in
                GIDD the time t. Of no effect without `time_conditioning`.
            **kwargs: of the attention function.

        Raises:
            ValueError: not exactly one of ids and embeddings.
        """
        past_key_values = kwargs.pop(NEW, past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if isinstance(attention_mask, Mapping):  # as block networks pass it to hosts with several kinds of layers
            attention_mask = attention_mask["full_attention"]
        condition = self._condition(input_ids, attention_mask, sigma, inputs_embeds)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(before, before + hidden.shape[1], device=hidden.device)[None]
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            **{CURRENT: past_key_values},
            and_mask_function=self._earlier_blocks(attention_mask, hidden),
        )
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        kwargs |= {CURRENT: past_key_values}
        for layer in self.layers:
            hidden = layer(
                hidden,
                condition,
                attention_mask=mask,
                position_embeddings=rotary,
                position_ids=position_ids,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden, condition), **{CURRENT: past_key_values})

    def _condition(
        self, ids: Tensor | None, attention_mask: Tensor | None, sigma: Tensor | None, inputs_embeds: Tensor | None
    ) -> Float[Tensor, "#batch d_cond"] | None:
        """Silu of the embedded noise level, for all rows at once where it is the same."""
        if self.sigma_map is None:
            return None
        if not self.config.time_conditioning or (sigma is None and not self.config.subs):
            device = (inputs_embeds if ids is None else ids).device  # type: ignore[union-attr]
            sigma = torch.zeros(1, device=device)
        elif sigma is None:
            if ids is None:
                raise ValueError("the network is given the noise level: with inputs_embeds, pass sigma [batch]")
            content = torch.ones_like(ids, dtype=torch.bool)
            if attention_mask is not None and attention_mask.shape == ids.shape:
                content = attention_mask.bool()
            masks = ((ids == self.config.mask_token_id) & content).sum(-1)
            sigma = self.config.level_of(masks / content.sum(-1).clamp(min=1))
        return cast(Tensor, self.sigma_map(sigma))

    def _earlier_blocks(self, attention_mask: Tensor | None, hidden: Tensor) -> Any:
        """Which keys a query sees by their indices, where attention is block causal; None where it is not.

        Blocks are counted from each row's first token.
        """
        width = getattr(self.config, "block_causal_length", None)
        if width is None:
            return None
        first = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        if attention_mask is not None and attention_mask.ndim == 2:
            first = attention_mask.long().argmax(-1)

        def earlier(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
            start = first[row]
            own = (query - start).div(width, rounding_mode="floor")
            return (key - start).div(width, rounding_mode="floor") <= own

        return earlier


class DiTForMaskedLM(MaskedDiffusionMixin, LlamaForCausalLM):
    """A DiT with its head, which has a bias; parity with the originals: tests/adapters/test_mdlm.py."""

    config_class = DiTConfig
    decoder_class = DiTModel
    _no_split_modules: ClassVar[list[str]] = ["DiTLayer"]
    # Buffers of the originals that are computed here: rotary frequencies; bounds of the noise in training.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"rotary_emb\.(inv_freq|(cos|sin)_cached)$", r"sampling_eps_(min|max)$",
    ]  # fmt: skip

    def __init__(self, config: DiTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        cast(Any, self).post_init()


RENAMES = (
    (r"^backbone\.vocab_embed\.embedding", "model.embed_tokens.weight"),
    (r"^backbone\.blocks\.(\d+)\.norm1", r"model.layers.\1.norm1"),
    (r"^backbone\.blocks\.(\d+)\.norm2", r"model.layers.\1.norm2"),
    (r"^backbone\.blocks\.(\d+)\.attn_qkv", r"model.layers.\1.attn_qkv"),  # split below
    (r"^backbone\.blocks\.(\d+)\.attn_out", r"model.layers.\1.self_attn.o_proj"),
    (r"^backbone\.blocks\.(\d+)\.mlp\.0", r"model.layers.\1.mlp.fc1"),
    (r"^backbone\.blocks\.(\d+)\.mlp\.2", r"model.layers.\1.mlp.fc2"),
    (r"^backbone\.output_layer\.norm_final", "model.norm.norm_final"),
    (r"^backbone\.output_layer\.linear", "lm_head"),
)
"""Names in the original checkpoints -> names here."""

RENAMES_OF_MODULATION = (
    (r"^backbone\.sigma_map\.mlp\.0", "model.sigma_map.fc1"),
    (r"^backbone\.sigma_map\.mlp\.2", "model.sigma_map.fc2"),
    (r"^backbone\.blocks\.(\d+)\.adaLN_modulation", r"model.layers.\1.modulation"),
    (r"^backbone\.output_layer\.adaLN_modulation", "model.norm.modulation"),
)
"""The same, in networks with modulation."""

CONVERSIONS = (
    WeightConverter(
        ["attn_qkv.weight"],
        [f"self_attn.{name}_proj.weight" for name in "qkv"],
        [Chunk(0)],
    ),
)
"""The fused projection, whose rows are those of q, then of k, then of v."""

TENSOR_NAMES: Mapping[str, Any] = {
    "renames": RENAMES, "renames_of_options": RENAMES_OF_MODULATION, "conversions": CONVERSIONS,
}  # fmt: skip
"""Fields of a `Family`: how the tensors of the original checkpoints are read."""

BARE_TENSOR_NAMES: Mapping[str, Any] = {
    **TENSOR_NAMES,
    **{
        field: tuple((pattern.replace(r"backbone\.", ""), name) for pattern, name in TENSOR_NAMES[field])
        for field in ("renames", "renames_of_options")
    },
}
"""Likewise, of checkpoints whose tensors have no prefix."""

TOKENIZERS = {50258: ("openai-community/gpt2", "gpt2")}
"""The released checkpoints hold no tokenizer."""

MASK_TOKEN = "[MASK]"
"""Of GPT-2's tokenizer, which has none; the original uses the id alone."""

GPT2_TOKENS: Mapping[str, Any] = {
    "special_ids": {50258: {"mask": 50257, "bos": 50256, "eos": 50256}},
    "mask_token": MASK_TOKEN,
    "tokenizers": TOKENIZERS,
}
"""Fields of a `Family`: GPT-2's vocabulary and the mask."""
