"""Hooks of torch that listen to a model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dlm_lens.adapters.float32_rotation import round_keys


def hooks_on(model: nn.Module) -> list[Callable[..., Any]]:
    """All but those with which a model is built: the rounding of keys that are rotated in float32."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return [hook for hook in hooks if hook is not round_keys]
