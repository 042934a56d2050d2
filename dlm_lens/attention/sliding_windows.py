"""Causality and sliding windows of each layer: which keys its queries see."""

import sys
from typing import Any

from torch import nn

from dlm_lens.attention.hook_points import attention_stacks, hooked_attentions
from dlm_lens.attention.sink_layout import SinkLayout

WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe"})
"""Layers without attention in transformers' `layer_types`: recurrent states, convolutions, experts."""

BESIDE_ATTENTION = {"hybrid": "full_attention"}
"""Kinds of layers that have other modules beside their attention (Falcon-H1, Zamba) -> what the attention is."""


def attending_layers(config: Any) -> int | None:
    """How many layers have attention, by a config; None where it does not say how many layers there are."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "num_hidden_layers", None)
    return sum(kind not in WITHOUT_ATTENTION for kind in kinds)


def attends_causally(model: Any, stack: str = "") -> bool:
    """Whether no query sees a later key: by the config's `is_causal`, and by that of the attention modules.

    Modules of transformers without one (LayoutLM) are causal if their file builds causal masks; others without one
    are, as in transformers' sdpa without a mask.

    Args:
        model: with hook points.
        stack: of `attention_stacks`; by default the one that predicts, of which alone the config speaks.
    """
    parts = hooked_attentions(model, stack) if stack else (model.config, *hooked_attentions(model))
    return all(_is_causal(each) for each in parts)


def _is_causal(part: Any) -> bool:
    own = getattr(part, "is_causal", None)
    if own is None and isinstance(part, nn.Module) and type(part).__module__.startswith("transformers."):
        return _builds([part], "create_causal_mask")
    return own is None or bool(own)


def layer_windows(model: Any) -> tuple[int | None, ...]:
    """The sliding window w of every layer, None where a layer has none: query i sees the keys i - w + 1, ..., i.

    Layers without attention (the recurrent ones of Qwen3-Next) are left out, here as in every recording.

    In an encoder that sees both sides (ModernBERT) query i sees the keys i - w, ..., i + w. The decoder beside an
    encoder (DiffusionGemma) sees its whole canvas and the last w - 1 positions before it.

    As transformers' models decide from the config: layers of the type "sliding_attention" have the window
    `sliding_window`; in a config without `layer_types` every layer has it. Where the code of an architecture builds
    no masks with windows, the field is ignored. Positions count padding.

    Raises:
        ValueError: layers of another type than these, queries that choose their keys (Doge), windows in a model
            that is not causal (unless its code builds masks with windows to both sides) or has learned sink tokens,
            or a window below 1.
    """
    attentions = hooked_attentions(model)
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    name = type(model).__name__
    chosen = getattr(config, "keep_window_size", None)
    if chosen is not None and chosen < config.max_position_embeddings:
        raise ValueError(
            f"a query of {name} sees the {chosen} keys that it chooses (keep_window_size) of up to "
            f"{config.max_position_embeddings}; statistics of attention support keys that follow from positions"
        )
    if kinds is None:
        whole = (
            "full_attention"
            if window is None or not _builds(attentions, "create_sliding_window_causal_mask")
            else "sliding_attention"
        )
        kinds = ["chunked_attention" if getattr(config, "attention_chunk_size", None) else whole] * len(attentions)
    kinds = [BESIDE_ATTENTION.get(kind, kind) for kind in kinds if kind not in WITHOUT_ATTENTION]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"{name} has {', '.join(unknown)} layers; statistics of attention support full_attention "
            "and sliding_attention"
        )
    if "sliding_attention" not in kinds:
        return (None,) * len(attentions)
    if not isinstance(window, int) or window < 1 or len(kinds) != len(attentions):
        raise ValueError(
            f"{name} has sliding_attention layers, sliding_window={window!r} and {len(kinds)} layer_types for "
            f"{len(attentions)} attention modules; statistics need a window of at least 1 and a type for each"
        )
    causal = attends_causally(model)
    # The decoder beside an encoder (DiffusionGemma) sees its canvas, and the window before it.
    sides = _builds(attentions, "create_bidirectional_sliding_window_mask") or "encoder" in attention_stacks(model)
    if not (causal or sides) or SinkLayout.of(model).count:
        why = "learned sink tokens" if causal or sides else "is not causal"
        raise ValueError(
            f"{name} has sliding_attention layers and {why}; "
            "statistics of attention support sliding windows of causal models without learned sink tokens"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def smallest_window(config: Any) -> int | None:
    """A lower bound of how many keys an attention module lets a query see that has as many before it; None for all.

    Modules with a chunk have 1: the first query of a chunk sees itself alone.
    """
    if getattr(config, "attention_chunk_size", None) is not None:
        return 1
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _builds(attentions: list[Any], function: str) -> bool:
    """Whether the files of these modules' classes use a function of transformers that builds masks."""
    files = {sys.modules.get(parent.__module__) for each in attentions for parent in type(each).__mro__}
    return any(hasattr(file, function) for file in files)
