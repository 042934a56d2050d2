"""The gradient of a weight that is both embedding and head, in one buffer instead of two.

Autograd adds the gradients of the two uses when it has both: two tensors of the largest weight's size,
[d_vocab, d_model]. Here the head's gradient is handed to the embedding's backward pass, which runs later, adds
its few rows and returns the sum. The numbers are the same.

Beside its rows the lookup returns a zero, the anchor, which the loss takes as an input: so autograd runs the
lookup's backward pass after the loss's, even where the rows themselves have no path to the loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from dlm_lens.attention import decoder_of


class HeadGradient:
    """Takes the head's gradient from the loss's backward pass and gives it to the embedding's."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def put(self, gradient: Float[Tensor, "d_vocab d_model"]) -> None:
        """Hold the head's gradient; the embedding's backward pass adds its rows to it in place."""
        self._held = gradient

    def take(self) -> Float[Tensor, "d_vocab d_model"] | None:
        """The gradient that is held, which is forgotten here; None where only another loss was differentiated."""
        held, self._held = self._held, None
        return held


class TiedLookup(TorchFunctionMode):
    """Gives the first lookup in one weight a backward pass that adds its rows to the head's gradient.

    The graph holds `gradient` and not this object, whose `anchor` holds the graph: so both are freed with the loss.

    Args:
        weight: of embedding and head.

    Attributes:
        gradient: from the loss's backward pass to the lookup's.
        anchor: the output of the lookup that waits for it, an input of the loss; None without such a lookup: the
            head's gradient must then go its usual way.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.gradient = weight, HeadGradient()
        self.anchor: Float[Tensor, ""] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The first lookup with its own backward pass, and every other function as it is."""
        if func is nn.functional.embedding and len(args) >= 2 and args[1] is self.weight:
            ids, padding, plain = _lookup_arguments(*args, **(kwargs or {}))
            if plain and self.anchor is None and torch.is_grad_enabled():
                rows, self.anchor = _Lookup.apply(self.weight, ids, padding, self.gradient)
                return rows
        return func(*args, **(kwargs or {}))


@contextmanager
def tied_gradient(model: Any) -> Iterator[TiedLookup | None]:
    """In this context the decoder's first lookup in a tied embedding shares the head's gradient buffer.

    None, and nothing changes, where the two weights differ, need no gradient, or are handled by another library:
    compiled decoders, FSDP, DeepSpeed.
    """
    weight = model.get_input_embeddings().weight
    compiled = getattr(decoder_of(model), "_compiled_call_impl", None) is not None
    tied = getattr(model.get_output_embeddings(), "weight", None) is weight and isinstance(weight, nn.Parameter)
    # `fully_shard` gives a module the method `unshard`, DeepSpeed a weight the attribute `ds_id`.
    foreign = compiled or hasattr(model, "unshard") or hasattr(weight, "ds_id")
    if foreign or not (tied and weight.requires_grad and torch.is_grad_enabled()):
        yield None
        return
    with TiedLookup(weight) as lookup:
        yield lookup


def _lookup_arguments(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, int, bool]:
    """Of those of `torch.nn.functional.embedding`: ids, padding (-1: none), and whether no other option is set."""
    plain = max_norm is None and not scale_grad_by_freq and not sparse
    return input, -1 if padding_idx is None else padding_idx, plain


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Int[Tensor, "..."], padding: int, gradient: HeadGradient
    ) -> tuple[Tensor, Tensor]:
        """The rows of the ids, and the anchor."""
        ctx.save_for_backward(ids)
        ctx.padding, ctx.gradient, ctx.shape = padding, gradient, weight.shape
        return nn.functional.embedding(ids, weight), weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, anchor: Tensor) -> tuple[Tensor | None, ...]:
        """The head's gradient plus the rows' own, summed per id as torch sums them."""
        (ids,) = ctx.saved_tensors
        whole = ctx.gradient.take()
        if whole is None:
            whole = slope.new_zeros(ctx.shape)
        found, place = ids.unique(return_inverse=True)
        # Each id once: adding rows at equal indices has no fixed order on a GPU.
        rows = torch.ops.aten.embedding_dense_backward(slope, place, len(found), -1, False)
        whole.index_add_(0, found, rows.masked_fill_((found == ctx.padding)[:, None], 0.0).to(whole.dtype))
        return whole, None, None, None
