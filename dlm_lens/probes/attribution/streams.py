"""What every part of a network adds to the residual stream in one pass, and how two passes differ in it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import (
    HookLike,
    adding_module,
    attention_blocks,
    attention_of,
    attention_stacks,
    head_width,
    output_weight,
)
from dlm_lens.attention.layers import output_projection
from dlm_lens.probes.attribution.edge_graph import EdgeGraph
from dlm_lens.probes.attribution.passes import FirstInput, Keep, Passes
from dlm_lens.probes.attribution.targets import Decisions

TOLERANCE = 1e-3
"""Largest error of the sum of all parts, as a share of the largest entry of the stream."""


class Streams:
    """Keeps what is written to and read from the residual stream in a pass.

    Args:
        passes: whose passes are kept.
        reads: keep queries, keys, values and the output of attention too, for gradients.
    """

    def __init__(self, passes: Passes, *, reads: bool = False) -> None:
        self.passes, self.blocks = passes, attention_blocks(passes.model)
        self.first = FirstInput(leaf=reads)
        self.mlp, self.last = Keep("mlp_out"), Keep("resid")
        self.heads: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        names = ("rot_q", "rot_k", "v", "attn_out") if reads else ("attn_out",)
        self.reads = {name: Keep(name) for name in names}  # type: ignore[arg-type]

    def decisions(self, step: int, hooks: Sequence[HookLike] = (), **options: Any) -> Decisions:
        """A pass that is kept."""
        with ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                projection = output_projection(attention_of(block))
                stack.callback(projection.register_forward_pre_hook(self._keep_heads(layer)).remove)
                stack.callback(block.register_forward_pre_hook(self._keep_input(layer), with_kwargs=True).remove)
            own = [self.mlp, self.last, *self.reads.values()]
            found = self.passes.decisions(step, [*hooks, *own], first=self.first, **options)
        self.inputs[0] = self.first.given
        return found

    def _keep_heads(self, layer: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            self.heads[layer] = args[0]

        return hook

    def _keep_input(self, layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self.inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return hook


def graph_of(model: Any, who: str) -> EdgeGraph:
    """The graph of a model whose parts add up to its residual stream.

    Raises:
        ValueError: an encoder of its own, a norm or a gate between a part and the stream, gated attention, or
            layers with different numbers of heads.
    """
    if len(attention_stacks(model)) > 1:
        raise ValueError(
            f"{who}: {type(model).__name__} has an encoder, through which a prompt acts outside the edges of one "
            "stack; take activation_patching"
        )
    blocks = attention_blocks(model)
    for block in blocks:
        if adding_module(block, "attn_out") is not attention_of(block):
            raise ValueError(
                f"{who}: {type(block).__name__} has a norm or a gate between the heads and the residual stream, so "
                "that their outputs do not add up to it; take activation_patching"
            )
        if _gated(attention_of(block)):
            raise ValueError(
                f"{who}: the gate of {type(attention_of(block)).__name__} reads the residual stream too, and edges "
                "end at queries, keys and values alone; take activation_patching"
            )
    sizes = [_heads(attention_of(block)) for block in blocks]
    other = next((layer for layer, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        (heads, keys), (these, those) = sizes[0], sizes[other]
        raise ValueError(
            f"{who}: layer 0 has {heads} heads and {keys} of keys, layer {other} {these} and {those}; edges are "
            "between layers of equal heads: take activation_patching"
        )
    return EdgeGraph(len(blocks), *sizes[0])


def _gated(attention: Any) -> bool:
    """Whether a function of the layer's input multiplies the outputs of the heads before their projection."""
    children = attention._modules
    if any(children.get(name) is not None for name in ("gate_proj", "g_proj")):
        return True
    # Qwen3-Next has the gate in the projection of the queries, which is twice as wide.
    queries = getattr(children.get("q_proj"), "out_features", None)
    return queries == 2 * output_weight(attention).shape[0]


def _heads(attention: Any) -> tuple[int, int]:
    heads = output_weight(attention).shape[0] // head_width(attention)
    return heads, heads // int(getattr(attention, "num_key_value_groups", 1))


class Differences:
    """What the parts of a network add in one pass more than in another.

    Args:
        graph: of the model.
        model: from `dlm_lens.load`.
        one: a kept pass.
        two: another; the differences are two - one.

    Raises:
        ValueError: the parts do not add up to the stream.
    """

    def __init__(self, graph: EdgeGraph, model: Any, one: Streams, two: Streams, who: str) -> None:
        self.graph = graph
        self.weights = [output_weight(attention_of(block)).detach() for block in attention_blocks(model)]
        self.embed = (two.first.given - one.first.given).detach()
        # Layers may lie on several devices; what they add is summed on that of the embedding.
        device = self.embed.device
        self.heads = [(two.heads[i] - one.heads[i]).detach().to(device) for i in range(graph.layers)]
        self.mlp = [(two.mlp.found[i] - one.mlp.found[i]).detach().to(device) for i in range(graph.layers)]
        last = (two.last.found[graph.layers - 1] - one.last.found[graph.layers - 1]).detach().to(device)
        outputs = (h @ w.to(device) for h, w in zip(self.heads, self.weights, strict=True))
        total = self.embed + sum(self.mlp) + sum(outputs)
        scale = max(float(two.last.found[graph.layers - 1].abs().max()), 1e-6)
        allowed = TOLERANCE if last.dtype in (torch.float32, torch.float64) else 0.05
        if float((total - last).abs().max()) > allowed * scale:
            raise ValueError(
                f"{who}: the outputs of heads and MLPs of {type(model).__name__} do not add up to its residual "
                "stream, so that it has no such edges; take activation_patching"
            )

    def along(
        self, gradients: Float[Tensor, "destination row position d_model"], before: int
    ) -> Float[Tensor, "row source destination"]:
        """The products difference . gradient for the first `before` sources."""
        gradients = gradients.to(self.embed.device)
        found = gradients.new_zeros(gradients.shape[1], len(self.graph.sources), len(gradients))

        def dotted(difference: Tensor) -> Tensor:
            return torch.einsum("nbpd,bpd->bn", gradients, difference)

        found[:, 0] = dotted(self.embed)
        for layer in range(self.graph.layers):
            heads = self.graph.heads_at(layer)
            if heads.start >= before:
                break
            reached = (gradients @ self.weights[layer].to(gradients.device).T).unflatten(-1, (self.graph.heads, -1))
            own = self.heads[layer].unflatten(-1, (self.graph.heads, -1))
            found[:, heads] = torch.einsum("nbphd,bphd->bhn", reached, own)
            if heads.stop < before:
                found[:, heads.stop] = dotted(self.mlp[layer])
        return found
