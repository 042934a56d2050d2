"""Decoder layers and norms inside a bridge: `hook_resid_mid` is the residual stream."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformer_lens.model_bridge.generalized_components import BlockBridge, GatedMLPBridge, RMSNormalizationBridge


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


class StreamBlock(BlockBridge):
    """TransformerLens's block, in which an edit of `hook_resid_mid` reaches `hook_resid_post` too.

    TransformerLens takes `hook_resid_mid` at the input of the second norm, so that an edit there reaches the MLP
    only. Here the layer's output is the edited stream plus what the MLP adds to it. While nothing edits the point
    the output is the native layer's own.
    """

    _kept: Mapping[str, Any] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        norm = self._modules.get("ln2")
        point = getattr(norm, "hook_in", None)
        if not isinstance(norm, LazyNorm) or point is None or not has_hooks(point):
            return super().forward(*args, **kwargs)
        kept: dict[str, Any] = {}

        def added(module: Any, inputs: Any, output: Tensor) -> None:
            kept["mlp"] = output

        handle = self._modules["mlp"].register_forward_hook(added)
        norm.passed = lambda given, hooked: kept.update(given=given, hooked=hooked)
        self._kept = kept
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()
            norm.passed = None
            del self._kept

    def _apply_output_hook(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self._kept
        if kept and kept["hooked"] is not kept["given"]:
            if self._read_use_hook_mlp_in():
                # hook_mlp_in comes before, and its edit is the MLP's alone.
                first = (output[0] if isinstance(output, tuple) else output) + (kept["hooked"] - kept["given"])
            else:
                first = kept["hooked"] + kept["mlp"]
            output = (first, *output[1:]) if isinstance(output, tuple) else first
        return super()._apply_output_hook(output, *args, **kwargs)


class NativeMLP(GatedMLPBridge):
    """TransformerLens's gated MLP, computed by the native module in compatibility mode too.

    TransformerLens computes folded weights by a function of its own that leaves `gate.hook_in` and `in.hook_in`
    out. The folded weights are in the projections, which the native module calls.
    """

    def forward(
        self, hidden_states: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "batch position d_model"]:
        """What the MLP adds to the residual stream."""
        found: Tensor = self.hook_out(self.original_component(self.hook_in(hidden_states)))
        return found
