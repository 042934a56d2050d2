"""DiffusionGemma: a causal encoder fills a cache, a bidirectional decoder denoises a canvas of random tokens."""

from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaBlockDiffusionOutputWithPast
from transformers.utils import can_return_tuple

from dlm_lens.adapters.config_fields import OF_LAYERS, check_fields_of_layers, without_foreign_fields
from dlm_lens.adapters.encoder_decoder import CanvasModel
from dlm_lens.adapters.head import head_logits
from dlm_lens.adapters.masked_diffusion import NoCustomGenerate
from dlm_lens.adapters.registry import Family
from dlm_lens.attention import add_hook_points
from dlm_lens.attention.cache_argument import CURRENT, returned_cache
from dlm_lens.printable import shown

DIFFUSION_GEMMA_SAMPLER = {
    "gen_length": 256,
    "steps_per_block": 48,
    "entropy_bound": 0.1,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}
"""The defaults of transformers' DiffusionGemmaGenerationConfig."""

GENERATION = {
    "max_new_tokens": "gen_length",
    "max_denoising_steps": "steps_per_block",
    "sampler_config": "entropy_bound",
    "t_min": "t_min",
    "t_max": "t_max",
    "stability_threshold": "stability_threshold",
    "confidence_threshold": "confidence_threshold",
    "eos_token_id": "eos_token_id",
}
"""Fields of generation_config.json -> our settings."""

TEXT_FIELDS = frozenset(field.name for field in fields(DiffusionGemmaTextConfig)) | {
    "final_logit_softcapping",
    "global_head_dim",
    "num_global_key_value_heads",
}
"""Fields of the text network."""

NOT_TEXT = frozenset(field.name for field in fields(DiffusionGemmaConfig))
IDS = ("pad_token_id", "eos_token_id", "bos_token_id")


@strict
class DiffusionGemmaLMConfig(DiffusionGemmaConfig):
    """Config of DiffusionGemma: transformers' own, with the text network's fields readable at the top.

    Fields of the text network may also be given at the top (`hidden_size=32`).

    Args:
        eot_token_id: of the end of a turn.
        sampler: the sampling algorithm, if not the family's.
        sampler_defaults: settings of `denoise`.

    Raises:
        ValueError: a field of the text network that cannot be.
    """

    eot_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None
    mask_token_id: int | None = None
    float32_logits: ClassVar[bool] = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Put fields of the text network into its config."""
        host: Any = self
        text: Any = host.text_config
        own = {name: kwargs.pop(name) for name in list(kwargs) if name in TEXT_FIELDS - NOT_TEXT}
        own |= {name: value for name in IDS if (value := getattr(self, name)) is not None}
        if not isinstance(text, DiffusionGemmaTextConfig):
            _check_text(text or {})
            own, text = {**without_foreign_fields(text or {}), **own}, None
        if text is None:
            host.text_config = DiffusionGemmaTextConfig(**own)
        else:
            for name, value in own.items():
                setattr(text, name, value)
        super().__post_init__(**without_foreign_fields(kwargs))
        if host.text_config.use_bidirectional_attention == "all":
            raise ValueError(
                "text_config says use_bidirectional_attention = 'all', with which transformers' layers fail (they "
                "pass is_causal twice); take None or 'vision'"
            )
        for name in IDS:
            setattr(self, name, getattr(host.text_config, name))

    @property
    def trained_block_length(self) -> int | None:
        """The canvas that the model was trained with."""
        return self.canvas_length

    def __getattr__(self, name: str) -> Any:
        # Only names that this config does not have itself; heads differ between the kinds of layers.
        if name in TEXT_FIELDS - OF_LAYERS - {"rope_parameters"} and "text_config" in vars(self):
            return getattr(vars(self)["text_config"], name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


def _check_text(values: Any) -> None:
    """Refuse a text_config whose fields cannot be, those of single layers among them.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(values, dict):
        raise ValueError(
            f"text_config is {shown(values)}; it must be an object with the fields of the text network"
        )
    check_fields_of_layers(values, "text_config")


class DiffusionGemmaLM(NoCustomGenerate, DiffusionGemmaForBlockDiffusion):
    """DiffusionGemma; parity with transformers' own class: tests/adapters/test_diffusion_gemma.py.

    `model(input_ids)` are the logits `[batch, canvas, d_vocab]` of the last `config.canvas_length` positions, the
    canvas, after the others as the prompt (`CanvasModel`). transformers' own calls, and its `generate`, work too.
    """

    config_class = DiffusionGemmaLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # By a field of the config, which is read once. transformers has a property of other names before 5.23.
        checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in self.modules())
        self.model = CanvasModel(config)
        if checkpointing:
            self.gradient_checkpointing_enable()
        self.tie_weights()
        add_hook_points(self)

    @property
    def attention_stacks(self) -> dict[str, Any]:
        """The stacks of layers with hook points: the one that predicts the canvas, and "encoder"."""
        return {"": self.model.decoder, "encoder": self.model.encoder.language_model}

    @property
    def generation_settings(self) -> dict[str, Any]:
        """What the checkpoint's generation_config.json says, under our names, ids that end the text among it."""
        theirs = {name: getattr(self.generation_config, name, None) for name in GENERATION}
        theirs["sampler_config"] = getattr(theirs["sampler_config"], "entropy_bound", None)
        return {GENERATION[name]: value for name, value in theirs.items() if value is not None}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether transformers may run the experts as grouped products; it looks for them in this file alone."""
        return True

    def get_decoder(self, *args: Any, **kwargs: Any) -> Any:
        """The network without its head, encoder included."""
        return self.model

    @can_return_tuple
    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Logits of the canvas, `[batch, canvas, d_vocab]`, in float32 at least; arguments as `CanvasModel`'s.

        Raises:
            ValueError: labels, or as `CanvasModel`.
        """
        kwargs.pop("logits_to_keep", None)
        if kwargs.pop("labels", None) is not None:
            raise ValueError("DiffusionGemma computes no loss here; leave labels out")
        output = self.model(input_ids, *args, **{**kwargs, "return_dict": True})
        return DiffusionGemmaBlockDiffusionOutputWithPast(
            logits=head_logits(self, output.last_hidden_state),
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            **{CURRENT: returned_cache(output)},
            encoder_last_hidden_state=output.encoder_last_hidden_state,
        )


FAMILY = Family(
    name="diffusion_gemma",
    layouts={"diffusion_gemma": (DiffusionGemmaLMConfig, DiffusionGemmaLM)},
    samplers={"diffusion_gemma": DIFFUSION_GEMMA_SAMPLER},
    has_mask_token=False,
    hub_names=("google/diffusiongemma-26B-A4B-it",),
    special_ids={262144: {"eot": 106}},
    tiny={
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "canvas_length": 8,
        "final_logit_softcapping": 20.0,
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "patch_size": 2,
            "position_embedding_size": 4,
        },
    },
)
