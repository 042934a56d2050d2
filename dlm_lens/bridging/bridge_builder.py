"""`bridge`: a TransformerBridge over a model of `dlm_lens.load`, whose weights it shares."""

import copy
from pathlib import Path
from typing import Any

from torch import nn
from transformer_lens.model_bridge.sources._bridge_builder import (
    build_bridge_config_from_hf,
    detect_tokenizer_bos_eos,
)
from transformer_lens.model_bridge.sources.transformers_driver import TransformersDriver
from transformers import PreTrainedModel

from dlm_lens.adapters import load
from dlm_lens.attention.model_access import ModelLock, lock_of, network_of, without_wrappers
from dlm_lens.bridging.architectures import ARCHITECTURES, architecture_of
from dlm_lens.bridging.diffusion_bridge import DiffusionBridge
from dlm_lens.placement import input_device


def bridge(model_or_name: Any, **load_options: Any) -> DiffusionBridge:
    """A model in TransformerLens: a `TransformerBridge` with `denoise` and a step axis.

    A loaded model is not changed: the bridge wraps a second set of modules that share its weights
    (`enable_compatibility_mode` gives the bridge weights of its own). The numbers are those of the model with
    `attn_implementation="hooked"`.

    Args:
        model_or_name: a model of `dlm_lens.load`, an embedded model's name, a directory or a hub name.
        **load_options: of `dlm_lens.load`, for a name.

    Raises:
        ValueError: options beside a loaded model, a model that dlm_lens did not load, one of another layout than
            Llama's, Qwen2's, Qwen3's and GPT-2's, or one with unmerged PEFT adapters.
    """
    model = network_of(model_or_name)
    if isinstance(model_or_name, str | Path):
        model = load(model_or_name, **load_options)
    elif load_options:
        raise ValueError(f"{', '.join(load_options)}: options are for loading; this model is loaded already")
    if not hasattr(model, "sampler_defaults"):
        raise ValueError(f"{type(model).__name__} was not loaded by dlm_lens.load; load it, then bridge it")
    model = without_wrappers(model)
    architecture = architecture_of(model.config)
    _check_merged(model)
    copied = weight_sharing_copy(model)
    name = model.config._name_or_path or type(model).__name__
    config = build_bridge_config_from_hf(model.config, architecture, name, model.dtype)
    adapter: Any = ARCHITECTURES[architecture](config)
    adapter.cfg.device = str(input_device(model))
    adapter.prepare_model(copied)
    tokenizer = _padding_tokenizer(model.tokenizer)
    if tokenizer is not None:
        adapter.cfg.tokenizer_prepends_bos, adapter.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(tokenizer)
    return DiffusionBridge(copied, adapter, tokenizer, driver=TransformersDriver(copied, adapter, tokenizer))


def _check_merged(model: nn.Module) -> None:
    """Refuse a model with PEFT's adapter layers: `W_Q` and its kin would be weights without the adapter's update.

    Raises:
        ValueError: an adapter is not merged.
    """
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "merge"):
            raise ValueError(
                f"{name} is an adapter layer of PEFT, which TransformerLens cannot address; pass "
                "model.merge_and_unload() to dlm_lens.bridge"
            )


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# transformers' own hooks for output_attentions; without the flag it installs them anew where they are needed.
_CAPTURING = "_output_capturing_hooks_installed"


def weight_sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model with modules of its own and the parameters, buffers and tokenizer of `model`.

    Replacing a module or a parameter of the copy does not change `model`; training either model trains both. Hooks
    on `model` stay there and do not act in the copy.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers(), getattr(model, "tokenizer", None)]
    memo: dict[int, Any] = {id(value): value for value in shared if value is not None}
    lock = lock_of(model)
    if lock is not None:
        # Hooks on `model` do not prevent the copy: they are removed from it below.
        memo[id(lock)] = ModelLock()
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        _remove_hooks(module)
    return copied


def _remove_hooks(module: nn.Module) -> None:
    for name in _HOOK_TABLES:
        getattr(module, name).clear()
    module._forward_hooks_with_kwargs.clear()
    module._forward_hooks_always_called.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    if getattr(module, _CAPTURING, False):
        setattr(module, _CAPTURING, False)


def _padding_tokenizer(tokenizer: Any) -> Any:
    """A copy for TransformerLens, which changes it: padded on the left, with a padding token."""
    if tokenizer is None:
        return None
    own = copy.deepcopy(tokenizer)
    own.padding_side = "left"
    if own.pad_token is None:
        own.pad_token = own.eos_token
    return own
