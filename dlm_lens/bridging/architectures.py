"""How TransformerLens sees this library's families: two layouts, Llama's and Qwen2's, and what they share."""

from importlib.metadata import entry_points
from typing import Any

from torch import Tensor
from transformer_lens.factories import architecture_adapter_factory as factory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import LinearBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures.llama import LlamaArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.qwen2 import Qwen2ArchitectureAdapter

from dlm_lens.adapters import family_of
from dlm_lens.adapters.loading import attach, prepare_config
from dlm_lens.attention import SinkLayout
from dlm_lens.bridging.attention import DiffusionAttentionBridge, ZeroSinkValue
from dlm_lens.bridging.layers import LazyNorm, NativeMLP, StreamBlock


class FamilyArchitecture(ArchitectureAdapter):
    """Mixin in front of TransformerLens's adapters, for DLMs and AR baselines alike.

    TransformerLens's `generate`, its shifted loss and `diffusion_generate` are off for a DLM: it is denoised.
    """

    _attention_bridge_cls = DiffusionAttentionBridge
    # The bridge computes patterns itself; transformers need not return them.
    supports_hf_output_attentions = False
    native_sampler = None

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.cfg.attn_implementation = "hooked"
        self.cfg.default_padding_side = "left"
        _remove_point(self.components["blocks"].submodules["attn"], "hook_hidden_states")
        # The rotary module returns two tables, at hook_cos and hook_sin; hook_out is also hook_pos_embed.
        _remove_point(self.components["rotary_emb"], "hook_out")

    def prepare_loading(self, model_name: str, model_kwargs: dict[str, Any]) -> None:
        """Refuse pickled weights where TransformerLens loads the model."""
        model_kwargs["use_safetensors"] = True

    def prepare_model(self, hf_model: Any) -> None:
        """Fit the adapter to the model: direction of attention, sinks, gate, zero values.

        Raises:
            ValueError: the model carries a bridge already.
        """
        if any(isinstance(module, GeneralizedComponent) for module in hf_model.modules()):
            raise ValueError("this model already carries a bridge; give the model that dlm_lens.load returned")
        config, family = hf_model.config, family_of(hf_model.config.model_type)
        if not hasattr(hf_model, "sampler_defaults"):
            prepare_config(config, family)
            attach(hf_model, family)
        config._attn_implementation = "hooked"
        self.supports_generation = self.supports_causal_loss = family.causal
        self.cfg.attention_dir = "causal" if family.causal else "bidirectional"
        self.cfg.rotary_base = int(config.rope_parameters["rope_theta"])
        self.cfg.mask_token_id = getattr(config, "mask_token_id", None)
        self._fit_attention(config, causal=family.causal)

    def _fit_attention(self, config: Any, *, causal: bool) -> None:
        self.components["blocks"].__class__ = StreamBlock
        parts = self.components["blocks"].submodules
        parts["mlp"].__class__ = NativeMLP
        attention, layout = parts["attn"], SinkLayout.of(_Has(config))
        attention.is_causal = causal
        for name in ("ln1", "ln2"):
            parts[name] = LazyNorm(name=parts[name].name, config=self.cfg)
        self.components["ln_final"] = LazyNorm(name="model.norm", config=self.cfg)
        if layout.count and getattr(config, "zero_sink_value", False):
            attention.submodules["v"] = ZeroSinkValue(name="v_proj")
            attention.submodules["v"].layout = layout
        if getattr(config, "gated_attention", False):
            attention.submodules["gate"] = LinearBridge(name="gate_proj")
            attention.hook_gate, attention.hook_z_ungated = HookPoint(), HookPoint()

    def setup_hook_compatibility(self, bridge: Any) -> None:
        """Called by every new bridge: make it a `DiffusionBridge`, and tell its hook points of the sinks."""
        from dlm_lens.bridging.model import DiffusionBridge

        DiffusionBridge.adopt(bridge)

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold a norm's weight into the gate of gated attention too, which reads what q, k and v read."""
        state_dict = super().preprocess_weights(state_dict)
        for key in [key for key in state_dict if key.endswith("attn.gate.weight")]:
            norm = state_dict[key.replace("attn.gate", "ln1")]
            if self._fold_ln_requested:
                state_dict[key] = state_dict[key] * norm[None, :]
        return state_dict


def _remove_point(component: GeneralizedComponent, name: str) -> None:
    """Take out a hook point that TransformerLens makes and that no configuration of this architecture runs."""
    delattr(component, name)
    del component._hook_registry[name]


class _Has:
    """Something with a config."""

    def __init__(self, config: Any) -> None:
        self.config = config


class LlamaFamily(FamilyArchitecture, LlamaArchitectureAdapter):
    """LLaDA, MMaDA, SMDM and Llama itself."""


class Qwen2Family(FamilyArchitecture, Qwen2ArchitectureAdapter):
    """Dream, the sink-token Qwen DLMs and Qwen2 itself."""


ARCHITECTURES = {"DlmLensLlama": LlamaFamily, "DlmLensQwen2": Qwen2Family}
"""Names that a config's `original_architecture` may say -> adapters; also entry points of the package."""

AUTOREGRESSIVE = {"llama": "DlmLensLlama", "qwen2": "DlmLensQwen2"}
"""Model types of transformers' own, whose configs name TransformerLens's stock adapters."""


def architecture_of(config: Any) -> str:
    """The adapter's name for a model's config.

    Raises:
        ValueError: a transformers model of another layout.
    """
    found = AUTOREGRESSIVE.get(config.model_type) or getattr(config, "original_architecture", None)
    if found not in ARCHITECTURES:
        raise ValueError(
            f"dlm_lens.bridge takes the layouts of Llama and Qwen2, not a model of type {config.model_type!r}; use "
            "TransformerLens's own TransformerBridge.boot_transformers, or dlm_lens.DiffusionLM and "
            "dlm_lens.denoise(hooks=...), which take any causal model of transformers"
        )
    return str(found)


def register_architectures() -> None:
    """Make the adapters known to TransformerLens; safe to call again."""
    found = {point.name for point in entry_points(group="transformer_lens.architectures")}
    for name, adapter in ARCHITECTURES.items():
        # boot_transformers looks only here.
        factory.SUPPORTED_ARCHITECTURES.setdefault(name, adapter)
        # Installed, we are found by entry point; TransformerLens warns of a name that somebody registered before.
        if name not in found:
            factory.ArchitectureAdapterFactory.register_adapter(name, adapter)
