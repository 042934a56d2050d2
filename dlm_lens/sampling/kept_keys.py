"""Caches of transformers' class: of a text that several rows see, and one whose keys and values have one dtype."""

import inspect
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dlm_lens.attention import decoder_of
from dlm_lens.attention.cache_argument import NEW, OLD
from dlm_lens.attention.model_access import has_listeners
from dlm_lens.attention.sink_layout import SinkLayout


def keeps_keys(model: Any) -> bool:
    """Whether the keys and values of a text may be computed apart from what sees them.

    Not while something listens, which has to see whole texts; not with sink tokens, which the embedding puts before
    every sequence; not where a cache keeps anything but all keys and values (sliding windows, recurrent states), or
    where the rotation depends on the length of the text (dynamic NTK, LongRoPE).
    """
    decoder = decoder_of(model)
    if has_listeners(model) or SinkLayout.of(model).count or getattr(model, "_is_stateful", False):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    rotation = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if {"dynamic", "longrope"}.intersection(map(str, rotation.values())):
        return False
    if not {OLD, NEW}.intersection(inspect.signature(decoder.forward).parameters):
        return False
    layers = empty_cache(model).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def empty_cache(model: Any) -> DynamicCache:
    """A cache of the model's layers, without keys."""
    return DynamicCache(config=model.config)
