"""`EdgeGraph`: the edges of a network between what writes to the residual stream and what reads it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class EdgeGraph:
    """Sources and destinations of edges at one step, in the order of computation.

    Sources are the input of the first layer ("embed"), the output of every head ("a2.h3") and of every MLP ("m2").
    Destinations are the queries of every head ("a2.h3<q>"), keys and values of every key/value head ("a2.h1<k>",
    "a2.h1<v>"), the input of every MLP ("m2") and the input of the final norm ("logits"): the graph of EAP
    (2310.10348) and EAP-IG (2403.17806) for grouped keys and values.

    Args:
        layers: how many.
        heads: query heads of a layer.
        kv_heads: key/value heads of a layer.
    """

    layers: int
    heads: int
    kv_heads: int

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        found = ["embed"]
        for layer in range(self.layers):
            found += [f"a{layer}.h{head}" for head in range(self.heads)] + [f"m{layer}"]
        return tuple(found)

    @cached_property
    def destinations(self) -> tuple[str, ...]:
        """Names of the destinations."""
        found: list[str] = []
        for layer in range(self.layers):
            found += [f"a{layer}.h{head}<q>" for head in range(self.heads)]
            found += [f"a{layer}.h{head}<{kind}>" for kind in "kv" for head in range(self.kv_heads)]
            found.append(f"m{layer}")
        return (*found, "logits")

    def heads_at(self, layer: int) -> slice:
        """The sources that are heads of a layer."""
        start = 1 + layer * (self.heads + 1)
        return slice(start, start + self.heads)

    def mlp_at(self, layer: int) -> int:
        """The source that is the MLP of a layer."""
        return (layer + 1) * (self.heads + 1)

    def reads_at(self, layer: int) -> slice:
        """The destinations of a layer's attention: queries, keys, values."""
        start = layer * (self.heads + 2 * self.kv_heads + 1)
        return slice(start, start + self.heads + 2 * self.kv_heads)

    def mlp_input_at(self, layer: int) -> int:
        """The destination that is the MLP of a layer."""
        return self.reads_at(layer).stop

    @cached_property
    def exists(self) -> Bool[Tensor, "source destination"]:
        """Which edges there are: from what is computed before."""
        found = torch.zeros(len(self.sources), len(self.destinations), dtype=torch.bool)
        for layer in range(self.layers):
            before = self.heads_at(layer).start
            found[:before, self.reads_at(layer)] = True
            found[: self.mlp_at(layer), self.mlp_input_at(layer)] = True
        found[:, -1] = True
        return found

    @cached_property
    def kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The kind of every source (embed, head, mlp) and destination (q, k, v, mlp, logits)."""
        sources = tuple("embed" if n == "embed" else "mlp" if n[0] == "m" else "head" for n in self.sources)
        ends = tuple(n[-2] if n[-1] == ">" else "mlp" if n[0] == "m" else n for n in self.destinations)
        return sources, ends

    @cached_property
    def inner(self) -> Bool[Tensor, "destination source"]:
        """Which source depends on what a destination reads: a head on its own queries, keys and values."""
        found = torch.zeros(len(self.destinations), len(self.sources), dtype=torch.bool)
        group = self.heads // self.kv_heads
        for layer in range(self.layers):
            reads, heads = self.reads_at(layer).start, self.heads_at(layer).start
            for head in range(self.heads):
                key = reads + self.heads + head // group
                found[[reads + head, key, key + self.kv_heads], heads + head] = True
            found[self.mlp_input_at(layer), self.mlp_at(layer)] = True
        return found

    def on_paths(self, edges: Bool[Tensor, "source destination"]) -> Bool[Tensor, "source destination"]:
        """The edges that lie on a path from the embedding to the logits."""
        inner = self.inner.double()
        chosen = (edges & self.exists).double()
        reached = torch.zeros(len(self.sources), dtype=torch.double)
        reached[0] = 1
        leading = torch.zeros(len(self.destinations), dtype=torch.double)
        leading[-1] = 1
        for _ in range(2 * self.layers + 1):  # as many as the longest path has nodes
            reached = (reached + (reached @ chosen) @ inner).clamp(max=1)
            leading = (leading + inner @ (chosen @ leading)).clamp(max=1)
        return edges & self.exists & (reached > 0)[:, None] & (leading > 0)
