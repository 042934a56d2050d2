"""GIDD at 3B and 10B (2512.10858): masked and uniform noise, and a learned key and value in every layer.

A layer (dvruette/gidd-easydel, model/modeling_gidd_hf.py), with c = resid_scale / layers:

    x = x + c attention(norm(x))
    x = x + c mlp(norm(x)),   mlp(h) = W_down relu(W_up h + b)^2 + b'

Scores are 30 tanh(q k / (30 sqrt(d_head))), queries and keys have a norm over all heads, and every query sees one
more key, k_bias of the head, whose value is v_bias: both are parameters, no token has them.
"""

from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, LlamaModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields
from dlm_lens.adapters.registry import Family
from dlm_lens.adapters.sink_tokens import SinkDecoder, SinkMaskedDiffusion
from dlm_lens.attention import Placement, SinkLayout

GIDD_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "block_length": 128,
    "remasking": "ancestral",
    "temperature": 1.0,
    "top_p": None,
    "top_k": None,
    "schedule": "cosine",
    "tokens_per_step": 1,
    "min_length": 0,
    "canvas_length": 2048,
}
"""The defaults of `generate` in the released models' code; gen_length is ours (theirs: 2048)."""


class GiddConfig(MaskedDiffusionFields, LlamaConfig):
    """Config of GIDD: Llama's fields and those of its noise.

    Args:
        attention_bias: whether every layer has the learned key and value; in the results of this library they are a
            sink token, `sink(0)` (`num_sinks`).
        attn_soft_cap: c of the scores c tanh(s / c).
        resid_scale: attention and MLP are added times resid_scale / layers.
        head_scaling: the logits are W_U h times this; with tied embeddings they are not scaled.
        weight_scaling: factor of every product with a weight; 1 in the released models, and nothing else is
            implemented.
        use_qk_norm: norms of queries and keys; not without.
        noise_type: b of the share of random tokens among what is noise, sigmoid(log-SNR + b): great for uniform
            noise, far below 0 for masks.
        min_log_snr, max_log_snr: bounds of ln(alpha / (1 - alpha)), alpha the share of the text's tokens.
        excluded_token_id: the id of [MASK], which has no probability, also where no noise has it; 3 in the authors'
            `generate`. It is `mask_token_id` where the noise has masks and config.json names none.

    Raises:
        ValueError: layers of another kind.
    """

    # Of the MLP alone: queries and keys have one norm over all heads.
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    model_type = "gidd"
    original_class: ClassVar[str | None] = "GiddForDiffusionLM"
    zero_sink_value: ClassVar[bool] = False
    clean_context: ClassVar[bool] = True  # a text without noise before the noise does not see it
    gated_attention: ClassVar[bool] = False
    sink_placement: ClassVar[Placement] = "end"
    intermediate_size: int = 3072
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    vocab_size: int = 131072
    max_position_embeddings: int = 1024
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    mlp_bias: bool = False
    attention_bias: bool = False
    attn_soft_cap: float = 30.0
    resid_scale: float = 4.0
    head_scaling: float = 1.0
    weight_scaling: float | str | None = None
    use_qk_norm: bool = True
    init_scale: float = 0.4
    emb_init_scale: float = 0.1
    head_init_scale: float = 0.0
    attn_performer: str = "eager"
    noise_type: float = 0.0
    min_log_snr: float = -9.0
    max_log_snr: float = 9.0
    excluded_token_id: int = 3

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the options."""
        self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        causal = self.is_causal
        if causal or not self.use_qk_norm or self.weight_scaling not in (None, 1):
            raise ValueError(
                f"GIDD config has is_causal={causal}, use_qk_norm={self.use_qk_norm}, weight_scaling="
                f"{self.weight_scaling!r}; every released model has False, True and 1.0, and nothing else is "
                "implemented"
            )
        if self.num_attention_heads * cast(int, self.head_dim) != self.hidden_size:
            raise ValueError(
                f"GIDD config has {self.num_attention_heads} heads of width {self.head_dim} and hidden_size "
                f"{self.hidden_size}, over which queries and keys have one norm; it must be their product"
            )
        if self.mask_token_id is None and self.masked_noise:
            self.mask_token_id = self.excluded_token_id
        if not self.min_log_snr < self.max_log_snr:
            raise ValueError(
                f"GIDD config has min_log_snr {self.min_log_snr} and max_log_snr {self.max_log_snr}; the first "
                "must be the less"
            )

    @property
    def num_sinks(self) -> int:
        """One where every layer has the learned key and value, which are a sink token that no layer computes."""
        return int(self.attention_bias)

    @property
    def masked_noise(self) -> bool:
        """Whether a text that is all noise consists of masks rather than of random tokens."""
        return self.min_log_snr + self.noise_type < 0

    @property
    def subs(self) -> bool:
        """Whether texts have [MASK], which has no probability; its logit counts nowhere."""
        return self.mask_token_id is not None

    @property
    def logit_scale(self) -> float:
        """The factor of the logits."""
        return 1.0 if self.tie_word_embeddings else self.head_scaling

    @property
    def sampler_settings(self) -> dict[str, Any]:
        """Of the noise of the training, which the sampler follows."""
        return {name: getattr(self, name) for name in ("noise_type", "min_log_snr", "max_log_snr")}

    @property
    def empty_prompt(self) -> list[int] | None:
        """What stands for an empty prompt: the start of a text."""
        return None if self.bos_token_id is None else [self.bos_token_id]


class GiddRMSNorm(nn.Module):
    """X / sqrt(mean(x^2) + eps) times 1 + weight, in float32 whatever the model's dtype."""

    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(config.hidden_size)), config.rms_norm_eps

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the product."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.to(wide))).to(x.dtype)


class GiddKeyNorm(GiddRMSNorm):
    """The norm of the keys, after which the learned key is in the row of its sink token.

    That row's position is 0, where the rotation changes nothing.
    """

    def __init__(self, config: GiddConfig) -> None:
        super().__init__(config)
        self.layout, shape = (
            SinkLayout(config.num_sinks, config.sink_placement),
            (config.num_attention_heads, config.head_dim),
        )
        self.k_bias = nn.Parameter(torch.zeros(shape)) if self.layout.count else None

    def forward(self, x: Float[Tensor, "batch position d_model"]) -> Float[Tensor, "batch position d_model"]:
        """Return the keys."""
        return at_sink(super().forward(x), self.k_bias, self.layout)


def at_sink(
    heads: Float[Tensor, "batch position d_model"],
    learned: Float[Tensor, "head d_head"] | None,
    layout: SinkLayout,
) -> Float[Tensor, "batch position d_model"]:
    """Keys or values with the learned one in the row of the sink token; unchanged where there is none."""
    if learned is None:
        return heads
    canvas = heads[:, layout.canvas(heads.shape[1])]
    return layout.surround(canvas, learned.to(heads).flatten().expand(len(heads), 1, -1))


class GiddAttention(nn.Module):
    """Attention with a soft cap, and with a learned key and value of every head that all queries see."""

    def __init__(self, config: GiddConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = cast(int, config.head_dim)
        self.scaling, self.num_key_value_groups, self.is_causal = self.head_dim**-0.5, 1, False
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = GiddRMSNorm(config), GiddKeyNorm(config)
        self.layout = self.k_norm.layout
        self.v_bias = None if self.k_norm.k_bias is None else nn.Parameter(torch.zeros_like(self.k_norm.k_bias))

    def forward(
        self,
        hidden_states: Float[Tensor, "batch position d_model"],
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch position d_model"], Tensor | None]:
        """Return what attention gives, and the pattern where it was formed."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = self.q_norm(self.q_proj(hidden_states)), self.k_norm(self.k_proj(hidden_states))
        value = at_sink(self.v_proj(hidden_states), self.v_bias, self.layout)
        query, key, value = (part.view(shape).transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        z, pattern = attend(
            self, query, key, value, attention_mask,
            dropout=0.0, scaling=self.scaling, softcap=self.config.attn_soft_cap, **kwargs,
        )  # fmt: skip
        return self.o_proj(z.reshape(*hidden_states.shape[:-1], -1)), pattern


class GiddMLP(nn.Module):
    """W_down relu(W_up h + b)^2 + b'."""

    def __init__(self, config: GiddConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the output."""
        return cast(Tensor, self.down_proj(self.up_proj(hidden).relu().square()))


class ScaledAddition(nn.Module):
    """What a layer adds to the residual stream: the output of attention or MLP times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, added: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the product."""
        return self.factor * added


class GiddLayer(GradientCheckpointingLayer):
    """A layer; `attention_gate` and `mlp_gate` return what is added to the residual stream."""

    def __init__(self, config: GiddConfig, layer_idx: int) -> None:
        super().__init__()
        factor = config.resid_scale / config.num_hidden_layers
        self.self_attn, self.mlp = GiddAttention(config, layer_idx), GiddMLP(config)
        self.attn_layernorm, self.mlp_layernorm = GiddRMSNorm(config), GiddRMSNorm(config)
        self.attention_gate, self.mlp_gate = ScaledAddition(factor), ScaledAddition(factor)

    def forward(
        self, hidden_states: Float[Tensor, "batch position d_model"], **kwargs: Any
    ) -> Float[Tensor, "batch position d_model"]:
        """Return the residual stream after the layer."""
        attended, _ = self.self_attn(self.attn_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.attention_gate(attended)
        return cast(Tensor, hidden_states + self.mlp_gate(self.mlp(self.mlp_layernorm(hidden_states))))


class BareSinkEmbedding(nn.Embedding):
    """Token embedding with a row of zeros for the sink token whose key and value the layers have themselves."""

    def __init__(self, config: GiddConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.layout = SinkLayout(config.num_sinks, config.sink_placement)

    def forward(self, input: Int[Tensor, "batch canvas"]) -> Float[Tensor, "batch position d_model"]:
        """Embed the canvas."""
        canvas = super().forward(input)
        return self.layout.surround(canvas, canvas.new_zeros(len(canvas), self.layout.count, canvas.shape[-1]))


class GiddModel(SinkDecoder, LlamaModel):
    """The decoder. The row of the learned key and value has a residual stream of its own, which nothing reads."""

    _no_split_modules: ClassVar[list[str]] = ["GiddLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": GiddLayer, "attentions": GiddAttention}

    def __init__(self, config: GiddConfig) -> None:
        if config.weight_scaling is None:
            raise ValueError(
                'GIDD config has no weight_scaling, for which the authors\' code takes "fan_in"; every released '
                "model has 1.0, and nothing else is implemented: write 1.0 where that is what the weights have"
            )
        super().__init__(config)
        if config.num_sinks:
            self.embed_tokens = BareSinkEmbedding(config)
        self.layers = nn.ModuleList([GiddLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = GiddRMSNorm(config)
        cast(Any, self).post_init()

    def network_positions(
        self, layout: SinkLayout, canvas: Int[Tensor, "#batch canvas"]
    ) -> Int[Tensor, "#batch position"]:
        """Rotary positions: those of the canvas, and 0 for the learned key, which is not rotated."""
        return layout.surround(canvas, torch.zeros_like(canvas[:, :1]))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise: weights of a norm are added to 1."""
        super()._init_weights(module)
        if isinstance(module, GiddRMSNorm):
            initialization.zeros_(module.weight)
        for name in ("k_bias", "v_bias"):
            if (learned := module._parameters.get(name)) is not None:
                initialization.normal_(learned, std=cast(Any, self).config.initializer_range)


class ScaledLogits(LlamaForCausalLM):
    """Mixin after that of masked models: the logits times `logit_scale`."""

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """As the host's."""
        output: CausalLMOutputWithPast = super().forward(*args, **kwargs)
        output.logits = cast(Tensor, output.logits) * self.config.logit_scale
        return output


class GiddForDiffusion(SinkMaskedDiffusion, ScaledLogits):
    """Layers that see the whole canvas and predict all of it; parity: tests/adapters/test_gidd.py."""

    config_class = GiddConfig
    decoder_class = GiddModel
    _supports_sdpa: ClassVar[bool] = False  # torch's fused kernel has no soft cap
    _supports_flash_attn: ClassVar[bool] = False
    _no_split_modules: ClassVar[list[str]] = ["GiddLayer"]


FAMILY = Family(
    name="gidd",
    layouts={"gidd": (GiddConfig, GiddForDiffusion)},
    samplers={"gidd": GIDD_SAMPLER},
    hub_names=("dvruette/gidd-unif-3b", "dvruette/gidd-unif-10b", "dvruette/gidd-mask-3b"),
    # In the authors' tokenizer and `generate`; config.json has bos and eos alone.
    special_ids={131072: {"mask": 3, "bos": 0, "eos": 1, "pad": 2}},
    renames_of_options=((r"^model\.layers\.(\d+)\.self_attn\.k_bias", r"model.layers.\1.self_attn.k_norm.k_bias"),),
    tiny={"bos_token_id": 60, "weight_scaling": 1.0, "noise_type": 1000.0, "attention_bias": True, "mlp_bias": True,
          "head_scaling": 4.0, "sampler_defaults": {"canvas_length": 32}},
)  # fmt: skip
