"""RMSNorm inside a bridge, which computes what nobody reads only where somebody does."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformer_lens.model_bridge.generalized_components import RMSNormalizationBridge


class LazyNorm(RMSNormalizationBridge):
    """TransformerLens's RMSNorm bridge, whose second norm for its hook points runs only where somebody listens.

    `passed`, where it is set, is told of the input before and after `hook_in`.
    """

    passed: Callable[[Tensor, Tensor], object] | None = None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Normalised states, of the native module."""
        hooked = self.hook_in(hidden_states)
        if self.passed is not None:
            self.passed(hidden_states, hooked)
        # A PyTorch hook that a user registers by hand is no hook of TransformerLens's, and listens too.
        listened = has_hooks(self.hook_scale) or has_hooks(self.hook_normalized)
        states = self._hf_autograd_forward_with_hooks(hooked) if listened else self.original_component(hooked)
        output: Tensor = self.hook_out(states)
        return output


def has_hooks(point: Any) -> bool:
    """Whether anything listens to a hook point, registered by TransformerLens or by hand."""
    return any((point._forward_hooks, point._forward_pre_hooks, point._backward_hooks, point._backward_pre_hooks))
