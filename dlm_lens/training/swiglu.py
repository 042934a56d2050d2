"""The activation of gated MLPs, silu(gate) * up, which keeps two tensors for its backward pass instead of three.

Autograd keeps gate, up and silu(gate), each [batch, position, d_mlp], the largest activations of a layer, and holds
the gradients of all three at once. Here silu(gate) is computed again from gate, and the gradients are formed one
after the other. The numbers are the same to the bit.
"""

import weakref
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__)

_TILE = 2**20
"""Elements of the temporary tensors of a backward pass."""


class _Silu(NamedTuple):
    """A silu and its input, with their versions when it was computed."""

    gate: Tensor
    result: "weakref.ref[Tensor]"
    versions: tuple[int, int]

    def factor(self, one: Any, other: Any) -> Tensor | None:
        """The other factor of a product with the silu; None unless the backward pass of this file holds for it."""
        silu = self.result()
        up = other if one is silu else one
        if silu is None or not isinstance(up, Tensor) or not (one is silu or other is silu) or up is silu:
            return None
        # What was changed in place since then is left to autograd, which refuses it or knows better.
        whole = (self.gate._version, silu._version) == self.versions
        alike = (up.shape, up.dtype, up.device) == (silu.shape, silu.dtype, silu.device)
        return up if whole and alike and torch.is_grad_enabled() else None


class SwiGLU(TorchFunctionMode):
    """In this context a product with the latest `torch.nn.functional.silu` has the backward pass of this file.

    Such a product has no second derivative. Layers that are recomputed in the backward pass need the context there
    too: `recomputed` gives it.

    Example:
        >>> from dlm_lens.testing import tiny
        >>> tiny("sink_qwen").gradient_checkpointing_enable({"context_fn": SwiGLU.recomputed})
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: _Silu | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember the input of a silu, and replace its product with a tensor of the same shape."""
        if func is nn.functional.silu and not (kwargs or {}).get("inplace", False) and len(args) == 1:
            silu: Tensor = func(*args, **(kwargs or {}))
            self._latest = (
                _Silu(args[0], weakref.ref(silu), (args[0]._version, silu._version)) if silu.requires_grad else None
            )
            return silu
        if func in _PRODUCTS and len(args) == 2 and not kwargs and self._latest is not None:
            latest, up = self._latest, self._latest.factor(*args)
            if up is not None:
                self._latest = None
                return _Product.apply(latest.gate, up, args[0 if up is args[1] else 1].detach())
        return func(*args, **(kwargs or {}))

    @classmethod
    def recomputed(cls) -> tuple["SwiGLU", "SwiGLU"]:
        """The contexts of a layer's pass and of its repetition, the `context_fn` of `torch.utils.checkpoint`."""
        return cls(), cls()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Float[Tensor, "*n"], up: Float[Tensor, "*n"], activated: Float[Tensor, "*n"]
    ) -> Float[Tensor, "*n"]:
        """silu(gate) * up; `activated` is silu(gate)."""
        # The empty tensor: a layer that is recomputed outside the context saves other shapes, which is an error.
        ctx.save_for_backward(gate, up, gate.new_empty(0))
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Float[Tensor, "*n"]) -> tuple[Tensor | None, ...]:
        """Of gate: slope * up * silu'(gate); of up: slope * silu(gate)."""
        gate, up = (value.contiguous() for value in ctx.saved_tensors[:2])
        slope = slope.contiguous()
        of_gate = of_up = None
        if ctx.needs_input_grad[0]:
            of_gate = torch.empty_like(gate)
            parts = (value.view(-1).split(_TILE) for value in (slope, up, gate, of_gate))
            for given, factor, inner, out in zip(*parts, strict=True):
                out.copy_(torch.ops.aten.silu_backward(given * factor, inner))
            # The views hold it too.
            del parts, given, factor, inner, out
        # Where the layer was recomputed, this frees it.
        del up
        if ctx.needs_input_grad[1]:
            of_up = torch.empty_like(gate)
            for given, inner, out in zip(*(v.view(-1).split(_TILE) for v in (slope, gate, of_up)), strict=True):
                torch.mul(given, nn.functional.silu(inner), out=out)
        return of_gate, of_up, None
