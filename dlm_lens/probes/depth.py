"""`serial_depth`: the longest chain of operations of a pass, which bounds reasoning that leaves no tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.attention import attention_blocks, exclusive

_MOVES = """
_unsafe_view alias as_strided broadcast_in_dim cat clone constant_pad_nd copy detach diagonal embedding empty
empty_like empty_permuted expand flip full full_like gather getitem index index_put index_select lift_fresh
lift_fresh_copy new_empty new_full new_ones new_zeros ones ones_like permute repeat reshape roll scalar_tensor
scatter select select_scatter slice slice_scatter split split_with_sizes squeeze stack t transpose unbind unfold
unsqueeze view zeros zeros_like
"""
_REDUCES = """
all amax amin any argmax argmin bincount cummax cumsum histc index_add logcumsumexp max mean min prod scatter_add
sort std sum topk var var_mean
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

SINGLE = frozenset({"arange", "div", "_to_copy", "iota", "convert_element_type"})
"""Counted as one, beside the operations that torch marks as acting on each number alone."""


@dataclass(frozen=True)
class SerialDepth:
    """Depth of the circuit of one pass, in operations (2603.09786, section 3; its counting rules below).

    Inputs and weights have depth 0, an operation one more than its deepest operand: an operation on each number
    alone 1, a sum or maximum of n numbers ceil(log2 n), a sum of n products 1 + ceil(log2 n), moving numbers 0
    (google-deepmind/serial_depth). It is an upper bound, of this implementation: another order of the same sums can
    be less deep.

    The opaque serial depth of a run is the longest chain that passes no interpretable node. Tokens are
    interpretable, so that each step of a masked DLM, and each token of an AR model, begins anew: the opaque depth
    is that of one pass, however many there are. Where vectors pass from step to step beside the tokens
    (self-conditioning), the chain goes through all steps, unless these vectors are interpretable too: mapped
    through tokens (2606.20560, section 3), they are.

    Args:
        positions: of the canvas.
        layers: depth at the output of every decoder layer.
        logits: depth at the logits.
        decision: depth of the choice of a token, ceil(log2 d_vocab).
        unknown: operations that no rule counts, taken as depth 0; none for the models of the library.
    """

    positions: int
    layers: tuple[int, ...]
    logits: int
    decision: int
    unknown: tuple[str, ...] = ()

    @property
    def per_layer(self) -> float:
        """What a layer adds, on average."""
        first, last = self.layers[0], self.layers[-1]
        return (last - first) / (len(self.layers) - 1) if len(self.layers) > 1 else float(last)

    def opaque(self, steps: int, *, tokens: bool = True) -> int:
        """The opaque serial depth of a run without self-conditioning.

        Args:
            steps: of the run.
            tokens: whether the canvases between the steps count as interpretable; otherwise the chain goes from the
                first canvas to the last: steps (logits + decision), less the last decision.

        Raises:
            ValueError: less than one step.
        """
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        return self.logits if tokens else steps * self.logits + (steps - 1) * self.decision


@checked_arguments(positions=whole(least=1, most=2**20))
@torch.no_grad()
@exclusive
def serial_depth(model: Any, positions: int = 64, *, inputs: Mapping[str, Any] | None = None) -> SerialDepth:
    """The serial depth of one pass of a model.

    The pass is traced, not simulated: it runs once, with a canvas of one row. A model on the meta device needs no
    memory for its weights: `serial_depth(AutoModelForCausalLM.from_config(config).to("meta"))`.

    Args:
        model: from `dlm_lens.load`.
        positions: of the canvas; the depth grows with the logarithm.
        inputs: arguments of the pass beside `input_ids`.

    Raises:
        ValueError: a model without hook points.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(1, positions, dtype=torch.long, device=device)
    blocks = attention_blocks(model)
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    def one_pass(ids: Tensor) -> list[Tensor]:
        outputs.clear()
        logits = model(input_ids=ids, **dict(inputs or {})).logits
        return [*outputs, logits]

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        depths, unknown = depths_of(one_pass, ids)
    finally:
        for handle in handles:
            handle.remove()
    width = int(model.get_output_embeddings().weight.shape[0])
    return SerialDepth(positions, tuple(depths[:-1]), depths[-1], _tree(width), unknown)


def depths_of(call: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[list[int], tuple[str, ...]]:
    """The depth of every result of a function of tensors, and the operations that no rule counts.

    Args:
        call: returns tensors; it is called once.
        *inputs: of depth 0.
    """
    try:
        graph = make_fx(lambda *given: list(call(*given)), decomposition_table=_table())(*inputs).graph
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise ValueError(
            "the pass reads values of tensors to decide what it computes, which has no one depth; of a mixture of "
            "experts take the other implementation: model.set_experts_implementation('grouped_mm')"
        ) from None
    depths: dict[Node, int] = {}
    base: dict[Node, Node] = {}
    unknown: set[str] = set()
    results: list[int] = []

    def at(node: Node) -> int:
        # What was written into a tensor counts for every view of it.
        return max(depths[node], depths[base.get(node, node)])

    for node in graph.nodes:
        before = max((at(one) for one in node.all_input_nodes), default=0)
        if node.op == "output":
            results = [at(one) for one in node.args[0]]
        elif node.op == "call_function":
            own = _own_depth(node)
            if own is None:
                unknown.add(_name(node))
            depths[node] = before + (own or 0)
            aliases, written = _alias(node)
            if aliases:
                base[node] = base.get(node.args[0], node.args[0])
            if written:
                depths[base[node]] = max(depths[base[node]], depths[node])
        else:
            depths[node] = 0
    return results, tuple(sorted(unknown))


def _alias(node: Node) -> tuple[bool, bool]:
    """Whether the result is a view of the first operand, or that operand, and whether it is written into."""
    schema = getattr(node.target, "_schema", None)
    infos = [one.alias_info for one in schema.returns] if schema is not None else []
    aliases = bool(infos) and infos[0] is not None and isinstance(node.args[0], Node)
    return aliases, aliases and infos[0].is_write


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    return table | dict(get_decompositions([getattr(torch.ops.aten, name) for name in _TAKEN_APART.split()]))


def _name(node: Node) -> str:
    """The name of an operation, without the underscore of those that write in place."""
    packet = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(packet, "__name__", packet))
    return name.removesuffix("_") or name


def _own_depth(node: Node) -> int | None:
    """What the operation adds; None if no rule counts it."""
    name = _name(node)
    if name in MOVES:
        return 0
    if name in PRODUCTS:
        return 1 + _tree(_shape(node.args[0])[-1])
    if name in REDUCES:
        return _tree(_reduced(node))
    target: Any = node.target
    return 1 if name in SINGLE or torch.Tag.pointwise in getattr(target, "tags", ()) else None


def _reduced(node: Node) -> int:
    """How many numbers become one: input over output, or the length of the dimension where the shape stays."""
    shape = _shape(node.args[0])
    found = node.meta["val"]
    found = found[0] if isinstance(found, tuple | list) else found
    if tuple(found.shape) == shape or _name(node) in ("topk", "sort"):
        dim = node.args[2 if _name(node) == "topk" else 1 :][:1]
        return shape[dim[0] if dim and isinstance(dim[0], int) else -1]
    return math.prod(shape) // max(1, math.prod(found.shape))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _tree(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0
