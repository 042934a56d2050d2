"""`MaskedDiffusionMixin`: a causal LM of transformers as a masked DLM, and the default settings of samplers."""

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Unpack, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TransformersKwargs, can_return_tuple

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.adapters.float32_parts import EqualDtypeCache, Float32RotaryEmbedding
from dlm_lens.adapters.original_fields import OriginalFields
from dlm_lens.attention import (
    SinkLayout,
    add_hook_points,
    additive_mask,
    decoder_of,
    hooked_attentions,
    predicting_position,
    sees_window,
)
from dlm_lens.attention.cache_argument import CURRENT, NEW

LLADA_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "block_length": 128,
    "temperature": 0.0,
    "cfg_scale": 0.0,
    "remasking": "low_confidence",
}
"""The defaults of ML-GSAI/LLaDA's generate.py."""

DLLM_SAMPLER = {**LLADA_SAMPLER, "schedule": "linear"}
"""The defaults of ZHZisZZ/dllm's MDLMSampler."""

DLLM_BLOCK_SAMPLER = {**DLLM_SAMPLER, "block_length": 32}
"""The defaults of ZHZisZZ/dllm's BD3LMSampler."""

LLADA2_SAMPLER = {
    "steps_per_block": 32,
    "gen_length": 128,
    "block_length": 32,
    "temperature": 0.0,
    "threshold": 0.95,
    "minimal_topk": 1,
}
"""The defaults of ZHZisZZ/dllm's LLaDA2Sampler."""

LLADA2_EDITING_SAMPLER = {
    "gen_length": 128,
    "block_length": 32,
    "temperature": 0.0,
    "threshold": 0.95,
    "editing_threshold": 0.9,
    "max_post_steps": 16,
    "num_to_transfer": 1,
}
"""The defaults of ZHZisZZ/dllm's LLaDA21Sampler."""

LLADA2_LEVENSHTEIN_SAMPLER = {
    "steps_per_block": 32,
    "gen_length": 128,
    "block_length": 32,
    "threshold": 0.5,
    "editing_threshold": 0.0,
    "max_post_steps": 16,
}
"""The defaults of LLaDA2.2's `generate`; gen_length is ours."""

DMAX_SAMPLER = {
    "gen_length": 128,
    "block_length": 32,
    "temperature": 0.0,
    "threshold": 0.5,
    "end_threshold": 0.9,
    "self_conditioning": "confidence",
}
"""Of czg1225/DMax's evaluation on mathematics (eval_llada_dmax_math.sh); gen_length is ours (theirs is 2048)."""

LLADA2_MULTI_BLOCK_SAMPLER = {
    "gen_length": 128,
    "block_length": 32,
    "running_blocks": 2,
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.9,
    "threshold": 0.95,
    "temperature": 0.0,
}
"""Of the evaluation of MBD-LLaDA2-mini on mathematics (SJTU-DENG-Lab/Diffulex); gen_length is ours (4096 there)."""

D2F_SAMPLER = {
    "gen_length": 256,
    "block_length": 32,
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.95,
    "threshold": 0.9,
    "temperature": 0.0,
}
"""Of D2F's evaluation of Dream (eval_dream.sh); gen_length is that of GSM8K."""

DLLM_VAR_SAMPLER = {"gen_length": 1024, "block_length": 64, "threshold": 0.9}
"""Of dLLM-Var's demo (maomaocun/dLLM-Var, demo_dLLM-var.py)."""

D3LLM_SAMPLER = {
    "gen_length": 256,
    "block_length": 32,
    "add_block_threshold": 0.1,
    "entropy_threshold": 0.5,
    "temperature": 0.0,
}
"""Of d3LLM's demos (hao-ai-lab/d3LLM, chat/)."""

DREAM_SAMPLER = {"steps": 512, "gen_length": 128, "temperature": 0.0, "remasking": "origin", "eps": 1e-3}
"""The defaults of Dream's DreamGenerationConfig; gen_length is ours."""

P2_SAMPLER = {"steps": 128, "gen_length": 128, "temperature": 0.0}
"""Of Open-dLLM's rule "p2"; 128 steps and tokens as in its sample.py, and the temperature of its class."""

RND1_SAMPLER = {"steps": 256, "gen_length": 256, "temperature": 0.1, "greedy": False}
"""The defaults of RadicalNumerics/RND1's RND1GenerationConfig; gen_length is that of its demo."""

SMDM_SAMPLER = {
    "steps": 512,
    "gen_length": 128,
    "temperature": 1.0,
    "cfg_scale": 2.0,
    "remasking": "origin",
    "eps": 1e-5,
}
"""The defaults of ML-GSAI/SMDM's diff_sample; gen_length is ours (its context_length counts the prompt)."""

DIFFUGPT_SAMPLER = {"steps": 64, "gen_length": 128, "temperature": 0.95, "top_p": 0.9}
"""The defaults of HKUNLP/DiffuLLaMA's inf_diffugpt.py; gen_length is ours (theirs counts the prompt)."""

MDLM_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "predictor": "ddpm_cache",
    "noise_removal": True,
    "eps": 1e-5,
    "temperature": 1.0,
}
"""The defaults of kuleshov-group/mdlm's config.yaml; gen_length is ours (theirs is the whole context)."""

REMDM_SAMPLER = {**MDLM_SAMPLER, "remasking": "cap", "eta": 0.008, "nucleus_p": 0.9}
"""Of kuleshov-group/remdm's scripts/remdm-cap.sh, with the steps of its config.yaml."""

BD3LM_SAMPLER = {
    "gen_length": 128,
    "block_length": 4,
    "steps_per_block": 128,
    "first_hitting": True,
    "nucleus_p": 1.0,
    "temperature": 1.0,
    "use_cache": True,
}
"""The defaults of kuleshov-group/bd3lms' config.yaml; gen_length and steps_per_block are ours (theirs are 5000)."""


SDAR_SAMPLER = {
    "gen_length": 128,
    "block_length": 4,
    "temperature": 1.0,
    "remasking": "low_confidence_dynamic",
    "threshold": 0.85,
}
"""The defaults of JetAstra/SDAR's block_diffusion_generate; block_length is that of the released models."""

SDAR_MULTI_BLOCK_SAMPLER = {
    **LLADA2_MULTI_BLOCK_SAMPLER,
    "block_length": 4,
    "running_blocks": 4,
    "semi_complete_threshold": 0.25,
}
"""Of the evaluation of MBD-SDAR-8B-Chat-b4 on mathematics; with blocks of 32 the second threshold is 0.9 there."""


@dataclass(kw_only=True)
class MaskedDiffusionFields(OriginalFields):
    """Mixin before a config of transformers: the fields of a masked DLM with the host's names.

    Args:
        logit_shift: position i is predicted by the output at i - 1 (dllm's `right_shift_logits`; off in the
            released models).
    """

    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    logit_shift: bool = False
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the authors' names; switch off the sampler's cache, and windows, which the authors' code drops."""
        host: Any = self
        self.take_original_names(kwargs)
        host.use_sliding_window = False
        if hasattr(host, "layer_types"):
            host.layer_types = None
        super().__post_init__(**without_foreign_fields(kwargs))  # type: ignore[misc]
        host.use_cache = False


class NoCustomGenerate:
    """Mixin before a class of transformers."""

    def load_custom_generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Never run a checkpoint's custom_generate/generate.py, even where the caller trusts remote code.

        Raises:
            OSError: transformers treats it as a missing file.
        """
        raise OSError("dlm_lens never executes code that came with a checkpoint")


class MaskedDiffusionMixin(NoCustomGenerate, nn.Module):
    """Mixin before a causal LM of transformers: the same layers, which see the whole canvas.

    The mask that transformers builds is bidirectional because the config says `is_causal = False`; the flag on
    each layer covers calls of a single layer. A family with a decoder of its own names its class in
    `decoder_class`.
    """

    decoder_class: ClassVar[type[Any] | None] = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        checkpointing = getattr(config, "gradient_checkpointing", False)
        super().__init__(config, *args, **kwargs)
        model = cast(Any, self)
        if self.decoder_class is not None:
            if checkpointing:  # the replaced decoder has removed the field from the config
                config.gradient_checkpointing = checkpointing
            setattr(model, model.base_model_prefix, self.decoder_class(config))
            model.tie_weights()  # the head was tied to the embedding of the replaced decoder
        if getattr(config, "float32_rotation", False):
            model.model.rotary_emb = Float32RotaryEmbedding(config)
        for attention in hooked_attentions(add_hook_points(model)):
            attention.is_causal = False
        model.loss_type = "ForMaskedLM"

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch position"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch position"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch position d_model"] | None = None,
        labels: Int[Tensor, "batch position"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]  # untyped to mypy
    ) -> CausalLMOutputWithPast:
        """Logits `[batch, position, d_vocab]`; with `labels` (-100: not counted) the cross entropy too.

        The logits are as the head gives them. The loss compares label i with the output that predicts position i:
        the output at i, or at i - 1 in a model with `logit_shift` (Dream), as `denoise` reads them, and with
        `subs` (MDLM) without the mask's logit. With learned
        sinks or labels the head runs on all positions, and the sinks' logits are removed after it.
        """
        host, layout = cast(Any, self), SinkLayout.of(self)
        whole = labels is not None or layout.count > 0
        cache = kwargs.pop(NEW, past_key_values)
        if use_cache and cache is None and self._rotates_in_float32:
            cache = EqualDtypeCache()
        output: CausalLMOutputWithPast = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CURRENT: cache},
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            logits_to_keep=0 if whole else logits_to_keep,
            **{**kwargs, "return_dict": True},
        )
        if not whole:
            return output
        logits, loss = cast(Tensor, output.logits), None
        logits = logits[:, layout.canvas(logits.shape[1])]
        if labels is not None:
            predictions = logits
            if getattr(host.config, "logit_shift", False):
                content = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
                if attention_mask is not None and attention_mask.ndim == 2:
                    content = attention_mask.bool().to(logits.device)
                rows = torch.arange(len(logits), device=logits.device)[:, None]
                predictions = logits[rows, predicting_position(content)]
            if getattr(host.config, "subs", False):
                mask = torch.tensor([host.config.mask_token_id], device=logits.device)
                predictions = predictions.index_fill(-1, mask, -torch.inf)
            loss = host.loss_function(
                logits=predictions.contiguous(), labels=labels, vocab_size=logits.shape[-1], **kwargs
            )
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        # A new object: the order in which fields are set decides the tuple of `return_dict=False`.
        return CausalLMOutputWithPast(**{**output, "loss": loss, "logits": logits})

    @property
    def _rotates_in_float32(self) -> bool:
        return isinstance(getattr(decoder_of(self), "rotary_emb", None), Float32RotaryEmbedding)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As of transformers' class, in whose file it looks for experts that may run as grouped products."""
        host: Any = next(one for one in cls.__mro__ if one.__module__.startswith("transformers."))
        return bool(host._can_set_experts_implementation())

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a masked diffusion model does not generate left to right."""
        raise NotImplementedError(
            f"{type(self).__name__} is a masked diffusion model and does not generate left to right; "
            "use dlm_lens.denoise(model, prompt)"
        )


class MaskOrderedDecoder:
    """Mixin before a decoder whose attention depends on which ids are [MASK] (WeDLM, SDLM, I-DLM)."""

    config: Any
    dtype: torch.dtype

    def visible(
        self, content: Bool[Tensor, "batch key"], masked: Bool[Tensor, "batch key"]
    ) -> Bool[Tensor, "batch 1 key key"]:
        """Which position sees which: those before it, and in the config's window of masks all of the window."""
        return sees_window(content, masked, self.config.mask_window)

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

        A mask [batch, 1, query, key] is taken as it is. Cached positions are taken for tokens.

        Raises:
            ValueError: embeddings without ids and without such a mask.
        """
        past_key_values = kwargs.pop(NEW, past_key_values)
        whole = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim == 4)
        if input_ids is not None and not whole:
            attention_mask = {"full_attention": self._order(input_ids, attention_mask, past_key_values)}
        elif inputs_embeds is not None and not whole:
            raise ValueError(
                f"{type(self).__name__} attends in an order that depends on which ids are [MASK]: give input_ids, "
                "or beside inputs_embeds an attention_mask of [batch, 1, query, key]"
            )
        host: Any = super()
        return host.forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CURRENT: past_key_values},
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def _order(
        self, ids: Int[Tensor, "batch position"], mask: Tensor | None, cache: Any
    ) -> Float[Tensor, "batch 1 query key"]:
        """The additive mask."""
        cached = 0 if cache is None else cache.get_seq_length()
        masked = torch.zeros(len(ids), cached + ids.shape[1], dtype=torch.bool, device=ids.device)
        if self.config.mask_token_id is not None:
            masked[:, cached:] = ids == self.config.mask_token_id
        content = torch.ones_like(masked) if mask is None else mask.bool()
        return additive_mask(self.visible(content, masked)[:, :, cached:], self.dtype)
