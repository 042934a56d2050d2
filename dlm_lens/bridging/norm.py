"""RMSNorm inside a bridge, which computes what nobody reads only where somebody does."""

from typing import Any

from torch import Tensor
from transformer_lens.model_bridge.generalized_components import RMSNormalizationBridge


class LazyNorm(RMSNormalizationBridge):
    """TransformerLens's RMSNorm bridge, whose second norm for its hook points runs only where somebody listens."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Normalised states, of the native module."""
        if self.hook_scale.has_hooks() or self.hook_normalized.has_hooks():
            normalised: Tensor = super().forward(hidden_states, **kwargs)
            return normalised
        output: Tensor = self.hook_out(self.original_component(self.hook_in(hidden_states)))
        return output
