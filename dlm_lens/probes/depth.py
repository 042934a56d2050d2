"""`serial_depth`: the longest chain of operations of a pass, which bounds reasoning that leaves no tokens."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_lens.adapters.expert_products import check_meta_experts
from dlm_lens.arguments import checked_arguments, flag, instance, whole
from dlm_lens.attention import attention_blocks, decoder_of, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.placement import input_device, lacks_numbers

_MOVES = """
_local_scalar_dense _unsafe_view alias as_strided broadcast_in_dim cat clone constant_pad_nd copy detach diagonal
embedding empty empty_like empty_permuted expand flip full full_like gather getitem index index_put index_select
lift_fresh lift_fresh_copy new_empty new_full new_ones new_zeros ones ones_like permute repeat reshape roll
scalar_tensor scatter select select_scatter set slice slice_scatter split split_with_sizes squeeze stack t transpose
unbind unfold unsqueeze view zeros zeros_like
"""
_REDUCES = """
all amax amin any argmax argmin bincount cummax cumsum histc index_add logcumsumexp max mean min nonzero prod
scatter_add sort std sum topk var var_mean
"""
_TAKEN_APART = """
_softmax _log_softmax native_layer_norm gelu silu addmm baddbmm var_mean mean softplus native_group_norm pow
scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
"""

MOVES = frozenset(_MOVES.split())
"""Operations that move numbers, or make them of nothing: depth 0."""

REDUCES = frozenset(_REDUCES.split())
"""Operations over n numbers that a tree of binary operations computes: depth ceil(log2 n)."""

PRODUCTS = frozenset({"mm", "bmm", "mv", "dot", "_grouped_mm"})
"""Products of matrices: depth 1 + ceil(log2 n) for sums of n terms."""

SINGLE = frozenset({"arange", "div", "pow", "_to_copy", "iota", "convert_element_type"})
"""Counted as one, beside the operations that torch marks as acting on each number alone."""


CONDITIONING = "self_conditioning_logits"
"""The argument of a pass that is conditioned on the logits of the step before."""


@dataclass(frozen=True)
class SerialDepth(ShowsItself):
    """Depth of the circuit of one pass, in operations (2603.09786, section 3; its counting rules below).

    Inputs and weights have depth 0, an operation one more than its deepest operand: an operation on each number
    alone 1, a sum or maximum of n numbers ceil(log2 n), a sum of n products 1 + ceil(log2 n), moving numbers 0
    (google-deepmind/serial_depth). It is an upper bound, of this implementation: another order of the same sums can
    be less deep.

    The opaque serial depth of a run is the longest chain that passes no interpretable node. Tokens are
    interpretable, so that each step of a masked DLM, and each token of an AR model, begins anew: the opaque depth
    is that of one pass, however many there are. Where vectors pass from step to step beside the tokens
    (self-conditioning), the chain goes through all steps, unless these vectors are interpretable too: mapped
    through tokens (2606.20560, section 3), they are. The probability that DMax passes on with a token counts as
    interpretable.

    Args:
        positions: of the canvas.
        layers: depth at the output of every decoder layer.
        logits: depth at the logits.
        decision: depth of the choice of a token, ceil(log2 d_vocab).
        conditioned: what a step adds that is conditioned on the logits of the step before; None in models without
            self-conditioning.
        unknown: operations that no rule counts, taken as depth 0; none for the models of the library.
    """

    positions: int
    layers: tuple[int, ...]
    logits: int
    decision: int
    conditioned: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def per_layer(self) -> float:
        """What a layer adds, on average."""
        first, last = self.layers[0], self.layers[-1]
        return (last - first) / (len(self.layers) - 1) if len(self.layers) > 1 else float(last)

    @checked_arguments(steps=None, tokens=flag(), conditioning=flag())
    def opaque(self, steps: int, *, tokens: bool = True, conditioning: bool = False) -> int:
        """The opaque serial depth of a run.

        Args:
            steps: of the run, or of a canvas where each begins without conditioning.
            tokens: whether the canvases between the steps count as interpretable; otherwise the chain goes from the
                first canvas to the last: steps (logits + decision), less the last decision.
            conditioning: whether what a step is conditioned on counts as interpretable, as once it is mapped
                through tokens; otherwise the chain goes through it: logits + (steps - 1) conditioned.

        Raises:
            ValueError: less than one step.
        """
        whole(least=1).check("steps", steps)
        through = 0 if conditioning else self.conditioned or 0
        through = through if tokens else max(through, self.logits + self.decision)
        return self.logits + (steps - 1) * through


@checked_arguments(positions=whole(least=1, most=2**20), inputs=instance(Mapping, "a dict of arguments, or None"))
@torch.no_grad()
@exclusive
def serial_depth(model: Any, positions: int = 64, *, inputs: Mapping[str, Any] | None = None) -> SerialDepth:
    """The serial depth of one pass of a model.

    The pass runs once, with a canvas of one row, and its operations are counted; on the meta device it needs no
    memory. Of a mixture of experts it is the depth of the implementation that is set
    (`model.set_experts_implementation`).

    Args:
        model: from `dlm_lens.load`.
        positions: of the canvas; the depth grows with the logarithm.
        inputs: arguments of the pass beside `input_ids`.

    Raises:
        ValueError: a model without hook points, or on the meta device with experts that have no shapes there.
    """
    check_meta_experts(model)
    device = torch.device("meta") if lacks_numbers(model) else input_device(model)
    ids = torch.zeros(1, positions, dtype=torch.long, device=device)
    blocks = attention_blocks(model)
    conditioned = CONDITIONING in inspect.signature(decoder_of(model).forward).parameters
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    def passes(ids: Tensor) -> list[Tensor]:
        given = dict(inputs or {})
        logits = model(input_ids=ids, **given).logits
        first = [*outputs, logits]
        return [*first, model(input_ids=ids, **given, **{CONDITIONING: logits}).logits] if conditioned else first

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        depths, unknown = depths_of(passes, ids)
    finally:
        for handle in handles:
            handle.remove()
    width, more = int(model.get_output_embeddings().weight.shape[0]), None
    if conditioned:
        *depths, last = depths
        more = last - depths[-1]
    return SerialDepth(positions, tuple(depths[:-1]), depths[-1], _tree(width), more, unknown)


def depths_of(call: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[list[int], tuple[str, ...]]:
    """The depth of every result of a function of tensors, and the operations that no rule counts.

    Args:
        call: returns tensors; it is called once.
        *inputs: of depth 0.
    """
    with DepthCounter() as counter:
        results = call(*inputs)
    return [counter.of(one) for one in results], tuple(sorted(counter.unknown))


class DepthCounter(TorchDispatchMode):
    """Counts the depth of every tensor that is computed while it is active.

    Views share a depth with the tensor that they are of, so that what is written into a part counts for all of it.

    Attributes:
        unknown: operations that no rule counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()
        # A weak reference keeps the address of a storage from being used again, and not its memory.
        self._depths: dict[int, tuple[StorageWeakRef, int]] = {}

    def of(self, tensor: Tensor) -> int:
        """The depth of a tensor; 0 if nothing computed it."""
        return self._depths.get(tensor.untyped_storage()._cdata, (None, 0))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, in parts where it has parts, and note the depth of its results."""
        kwargs = kwargs or {}
        with self:
            found = _table().get(func, func.decompose)(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        own = _own_depth(func, args, found)
        if own is None:
            self.unknown.add(_name(func))
        depth = max(map(self.of, given), default=0) + (own or 0)
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self._depths[storage._cdata] = StorageWeakRef(storage), max(depth, self.of(one))
        return found


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    return table | dict(get_decompositions([getattr(torch.ops.aten, name) for name in _TAKEN_APART.split()]))


def _name(func: Any) -> str:
    """The name of an operation, without the underscore of those that write in place."""
    name = str(func.overloadpacket.__name__)
    return name.removesuffix("_") or name


def _own_depth(func: Any, args: Sequence[Any], found: Any) -> int | None:
    """What the operation adds; None if no rule counts it."""
    name = _name(func)
    if name in MOVES:
        return 0
    if name in PRODUCTS:
        return 1 + _tree(args[0].shape[-1])
    if name in REDUCES:
        return _tree(_reduced(name, args, found))
    return 1 if name in SINGLE or torch.Tag.pointwise in func.tags else None


def _reduced(name: str, args: Sequence[Any], found: Any) -> int:
    """How many numbers become one: input over output, or the length of the dimension where the shape stays."""
    if name == "nonzero":  # the places of all entries, by a sum over those before
        return int(args[0].numel())
    shape, result = args[0].shape, found[0] if isinstance(found, tuple | list) else found
    if result.shape == shape or name in ("topk", "sort"):
        dim = args[2 if name == "topk" else 1 :][:1]
        return int(shape[dim[0] if dim and isinstance(dim[0], int) else -1])
    return math.prod(shape) // max(1, math.prod(result.shape))


def _tree(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0
