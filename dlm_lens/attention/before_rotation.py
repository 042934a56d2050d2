"""Queries and keys before rotation: `hook_q` and `hook_k`, fed by the modules that compute them.

The attention function is handed queries and keys after rotation only. Before it, they are what the last of `q_proj`
and `q_norm` (`k_proj`, `k_norm`) returns, so a forward hook on that module passes it through the hook point.
"""

from typing import Any

from torch import Tensor, nn

_NORMS = {"q": ("q_norm", "q_layernorm"), "k": ("k_norm", "k_layernorm")}


class ProjectionHook:
    """A forward hook on a projection or a norm that passes its output through a hook point, head by head."""

    def __init__(self, point: nn.Module, heads: int, width: int) -> None:
        self.point, self.heads, self.width = point, heads, width

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """The edited output; None where nothing was edited."""
        if output.ndim == 3:
            heads = output.unflatten(-1, (self.heads, self.width))
            edited: Tensor = self.point(heads)
            return None if edited is heads else edited.flatten(-2)
        # [batch, position, head, d_head], or [batch, head, position, d_head] where the module transposed before.
        if not self._transposed(inputs[0], output):
            edited = self.point(output)
            return None if edited is output else edited
        heads = output.transpose(1, 2)
        edited = self.point(heads)
        return None if edited is heads else edited.transpose(1, 2)

    def _transposed(self, value: Tensor, output: Tensor) -> bool:
        if output.shape[1] != self.heads or output.shape[2] != self.heads:
            return output.shape[1] == self.heads
        # As many positions as heads: a transposed view has the smaller stride first.
        return value.stride(1) < value.stride(2)


def follow_projections(attention: Any) -> None:
    """Feed `hook_q` and `hook_k` of an attention module, or take them away where they cannot be fed."""
    width = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    sizes = {name: _out_features(getattr(attention, f"{name}_proj", None)) for name in ("q", "k")}
    clipped = getattr(attention.config, "clip_qkv", None) is not None
    if not isinstance(width, int) or clipped or any(not size or size % width for size in sizes.values()):
        del attention.hook_q, attention.hook_k
        return
    attention.projection_hooks = {
        name: ProjectionHook(attention.get_submodule(f"hook_{name}"), size // width, width)
        for name, size in sizes.items()
    }
    keep_following(attention)


def keep_following(attention: Any) -> None:
    """Put the hooks on the modules that compute queries and keys now.

    Quantisation and adapters such as LoRA replace projections after hook points were added: called before every
    forward, so that the hook points see what the new module returns.
    """
    for name, hook in getattr(attention, "projection_hooks", {}).items():
        source = _source(attention, name)
        if hook not in source._forward_hooks.values():
            for module in attention.modules():
                for key in [key for key, held in module._forward_hooks.items() if held is hook]:
                    del module._forward_hooks[key]
            source.register_forward_hook(hook)


def stop_following(attention: Any) -> None:
    """Take `hook_q` and `hook_k` away."""
    hooks = attention.projection_hooks.values()
    for module in attention.modules():
        for key in [key for key, held in module._forward_hooks.items() if any(held is hook for hook in hooks)]:
            del module._forward_hooks[key]
    del attention.hook_q, attention.hook_k, attention.projection_hooks


def _source(attention: Any, name: str) -> Any:
    """The module whose output is the query (key) before rotation."""
    for norm in _NORMS[name]:
        if isinstance(attention._modules.get(norm), nn.Module):
            return attention._modules[norm]
    return attention._modules[f"{name}_proj"]


def _out_features(module: Any) -> int:
    size = getattr(module, "out_features", None)
    return size if isinstance(size, int) else 0
