"""TransformerLens's architecture adapters for the layouts of Llama, Qwen2, Qwen3 and GPT-2; their registration."""

from functools import wraps
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor
from transformer_lens.factories import architecture_adapter_factory as factory
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import LinearBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.supported_architectures.gpt2 import GPT2ArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.llama import LlamaArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.qwen2 import Qwen2ArchitectureAdapter
from transformer_lens.model_bridge.supported_architectures.qwen3 import Qwen3ArchitectureAdapter

from dlm_lens.adapters import family_of
from dlm_lens.adapters.model_names import embedded_path
from dlm_lens.adapters.model_preparation import finish_model, prepare_config
from dlm_lens.attention import SinkLayout
from dlm_lens.bridging.components import (
    DiffusionAttentionBridge,
    FusedProjection,
    JointAttentionBridge,
    LazyLayerNorm,
    LazyRMSNorm,
    NativeGatedMLP,
    NativePlainMLP,
    StreamBlock,
    ZeroSinkValue,
)
from dlm_lens.bridging.diffusion_bridge import DiffusionBridge


class FamilyArchitecture(ArchitectureAdapter):
    """Mixin for TransformerLens's adapters, of DLMs and AR baselines alike; it comes before them in the bases.

    A DLM does not support TransformerLens's `generate`, its shifted loss and `diffusion_generate`; use `denoise`.
    """

    _attention_bridge_cls = DiffusionAttentionBridge
    mlp_class: ClassVar[type[Any]] = NativeGatedMLP
    norm_class: ClassVar[type[Any]] = LazyRMSNorm
    # The bridge computes patterns itself.
    supports_hf_output_attentions = False
    native_sampler = None

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.cfg.attn_implementation = "hooked"
        self.cfg.default_padding_side = "left"
        _remove_point(self.components["blocks"].submodules["attn"], "hook_hidden_states")
        if "rotary_emb" in self.components:
            # The rotary module returns two tables, at hook_cos and hook_sin; hook_out is also hook_pos_embed.
            _remove_point(self.components["rotary_emb"], "hook_out")

    def prepare_loading(self, model_name: str, model_kwargs: dict[str, Any]) -> None:
        """Refuse pickled weights when TransformerLens loads the model."""
        model_kwargs["use_safetensors"] = True

    def prepare_model(self, hf_model: Any) -> None:
        """Set the adapter up for a model: direction of attention, sinks, gate, zero values.

        Raises:
            ValueError: the model carries a bridge already.
        """
        if any(isinstance(module, GeneralizedComponent) for module in hf_model.modules()):
            raise ValueError("this model already carries a bridge; give the model that dlm_lens.load returned")
        config, family = hf_model.config, family_of(hf_model.config.model_type)
        if not hasattr(hf_model, "sampler_defaults"):
            prepare_config(config, family)
            finish_model(hf_model, family)
        config._attn_implementation = "hooked"
        self.supports_generation = self.supports_causal_loss = family.causal
        self.cfg.attention_dir = "causal" if family.causal else "bidirectional"
        if "rotary_emb" in self.components:
            self.cfg.rotary_base = int(config.rope_parameters["rope_theta"])
        self.cfg.mask_token_id = getattr(config, "mask_token_id", None)
        self._set_components(config, causal=family.causal)

    def _set_components(self, config: Any, *, causal: bool) -> None:
        self.components["blocks"].__class__ = StreamBlock
        parts = self.components["blocks"].submodules
        parts["mlp"].__class__ = self.mlp_class
        attention, layout = parts["attn"], SinkLayout.of(SimpleNamespace(config=config))
        attention.is_causal = causal
        for name in ("ln1", "ln2"):
            parts[name] = self.norm_class(name=parts[name].name, config=self.cfg)
        self.components["ln_final"] = self.norm_class(name=self.components["ln_final"].name, config=self.cfg)
        if layout.count and getattr(config, "zero_sink_value", False):
            attention.submodules["v"] = ZeroSinkValue(name="v_proj")
            attention.submodules["v"].layout = layout
        if getattr(config, "gated_attention", False):
            attention.submodules["gate"] = LinearBridge(name="gate_proj")
            attention.hook_gate, attention.hook_z_ungated = HookPoint(), HookPoint()

    def setup_hook_compatibility(self, bridge: Any) -> None:
        """Make a new bridge a `DiffusionBridge`; TransformerLens calls this for every bridge that it builds."""
        DiffusionBridge.adopt(bridge)

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold a norm's weight also into the gate of gated attention, whose input is that of q, k and v."""
        state_dict = super().preprocess_weights(state_dict)
        for key in [key for key in state_dict if key.endswith("attn.gate.weight")]:
            norm = state_dict[key.replace("attn.gate", "ln1")]
            if self._fold_ln_requested:
                state_dict[key] = state_dict[key] * norm[None, :]
        return state_dict


def _remove_point(component: GeneralizedComponent, name: str) -> None:
    """Remove a hook point that TransformerLens adds and that no configuration of this architecture runs."""
    delattr(component, name)
    del component._hook_registry[name]


class LlamaFamily(FamilyArchitecture, LlamaArchitectureAdapter):
    """LLaDA, MMaDA, SMDM and Llama itself."""


class Qwen2Family(FamilyArchitecture, Qwen2ArchitectureAdapter):
    """Dream, the sink-token Qwen DLMs and Qwen2 itself."""


class Qwen3Family(FamilyArchitecture, Qwen3ArchitectureAdapter):
    """A2D-Qwen3 and Qwen3 itself, whose heads have norms of q and k."""


class GPT2Family(FamilyArchitecture, GPT2ArchitectureAdapter):
    """DiffuGPT and GPT-2 itself: positions are embedded, and one projection makes q, k and v."""

    mlp_class = NativePlainMLP
    norm_class = LazyLayerNorm

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        attention = self.components["blocks"].submodules["attn"]
        attention.__class__ = JointAttentionBridge
        attention.hook_rot_q, attention.hook_rot_k = HookPoint(), HookPoint()
        fused = attention.submodules["qkv"]
        fused.__class__ = FusedProjection
        for name in ("hook_in", "hook_out"):
            _remove_point(fused, name)


ARCHITECTURES = {
    "DlmLensLlama": LlamaFamily,
    "DlmLensQwen2": Qwen2Family,
    "DlmLensQwen3": Qwen3Family,
    "DlmLensGPT2": GPT2Family,
}
"""Values of a config's `original_architecture` -> adapters; also entry points of the package."""

AUTOREGRESSIVE = {
    "gpt2": "DlmLensGPT2",
    "llama": "DlmLensLlama",
    "qwen2": "DlmLensQwen2",
    "qwen3": "DlmLensQwen3",
}
"""Model types of transformers whose own configs lead to TransformerLens's stock adapters -> our adapter."""


def architecture_of(config: Any) -> str:
    """The adapter's name for a model's config.

    Raises:
        ValueError: a transformers model of another layout.
    """
    found = AUTOREGRESSIVE.get(config.model_type) or getattr(config, "original_architecture", None)
    if found not in ARCHITECTURES:
        raise ValueError(
            "dlm_lens.bridge takes the layouts of Llama, Qwen2, Qwen3 and GPT-2, not a model of type "
            f"{config.model_type!r}; use dlm_lens.DiffusionLM or dlm_lens.denoise(hooks=...), or of an AR model "
            "TransformerLens's own TransformerBridge.boot_transformers"
        )
    return str(found)


def register_architectures() -> None:
    """Register the adapters with TransformerLens; may be called again."""
    found = {point.name for point in entry_points(group="transformer_lens.architectures")}
    for name, adapter in ARCHITECTURES.items():
        # boot_transformers reads this table only.
        factory.SUPPORTED_ARCHITECTURES.setdefault(name, adapter)
        # An installed package is found by its entry point; TransformerLens warns if a name is registered twice.
        if name not in found:
            factory.ArchitectureAdapterFactory.register_adapter(name, adapter)


def register_embedded_models() -> None:
    """Let `TransformerBridge.boot_transformers` take the embedded models' names; may be called again."""
    boot = TransformerBridge.boot_transformers
    if getattr(boot, "takes_embedded_models", False):
        return

    @wraps(boot)
    def boot_transformers(model_name: str, *args: Any, **options: Any) -> Any:
        return boot(embedded_path(model_name), *args, **options)

    boot_transformers.takes_embedded_models = True  # type: ignore[attr-defined]
    TransformerBridge.boot_transformers = staticmethod(boot_transformers)
