"""`Circuit`: a set of edges, and how much two sets have in common beyond chance."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import ONE_SEED, checked_arguments, instance, is_whole, whole
from dlm_lens.printable import shown
from dlm_lens.probes.attribution.edge_graph import EdgeGraph


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges of a network.

    Args:
        graph: sources and destinations.
        edges: which are in the circuit.
        scores: of all edges, by which they were chosen.
        requested: how many were chosen before those on no path were removed.
    """

    graph: EdgeGraph = field(repr=False)
    edges: Bool[Tensor, "source destination"]
    scores: Float[Tensor, "source destination"]
    requested: int

    def __repr__(self) -> str:
        share = len(self) / int(self.graph.exists.sum())
        return (
            f"Circuit({len(self)} edges of {int(self.graph.exists.sum())} ({share:.1%}), {len(self.nodes)} nodes)"
        )

    def __len__(self) -> int:
        return int(self.edges.sum())

    @classmethod
    def of_scores(cls, graph: EdgeGraph, scores: Float[Tensor, "source destination"], edges: int) -> "Circuit":
        """The edges of largest absolute score that lie on paths from the embedding to the logits.

        Raises:
            ValueError: fewer than 1 edge or more than there are.
        """
        count = int(graph.exists.sum())
        if not is_whole(edges) or not 1 <= edges <= count:
            raise ValueError(f"edges is {shown(edges)}; the graph has {count}, so give 1 to {count}")
        order = scores.abs().masked_fill(~graph.exists, -1.0).flatten().argsort(descending=True, stable=True)
        chosen = torch.zeros(scores.numel(), dtype=torch.bool)
        chosen[order[:edges]] = True
        return cls(graph, graph.on_paths(chosen.reshape(scores.shape)), scores, edges)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The sources of its edges."""
        return tuple(name for name, has in zip(self.graph.sources, self.edges.any(-1).tolist(), strict=True) if has)


@dataclass(frozen=True)
class CircuitOverlap:
    """How much two circuits have in common.

    Args:
        jaccard: edges in both / edges in either (2601.14758).
        weighted: sum min(|a|, |b|) / sum max(|a|, |b|) of all scores, those of each network divided by their sum.
        null: mean Jaccard index of random edges: as many from each pair of kinds (head to q, MLP to logits, ...).
        null_low: 2.5% quantile of it.
        null_high: 97.5% quantile.
        draws: how many random pairs.
    """

    jaccard: float
    weighted: float
    null: float
    null_low: float
    null_high: float
    draws: int

    def __repr__(self) -> str:
        null = f"{self.null:.3f} [{self.null_low:.3f}, {self.null_high:.3f}]"
        return (
            f"CircuitOverlap(Jaccard {self.jaccard:.3f}, weighted {self.weighted:.3f}; random edges of the same "
            f"kinds {null})"
        )


CIRCUIT = instance(Circuit, "a Circuit, such as EdgeScores.circuit(50)")
"""What an argument that takes edges must be; the scores of `edge_attribution` are of all edges."""


@checked_arguments(one=CIRCUIT, two=CIRCUIT, draws=whole(least=1), seed=ONE_SEED)
def circuit_overlap(one: Circuit, two: Circuit, *, draws: int = 1000, seed: int = 0) -> CircuitOverlap:
    """The overlap of two circuits of networks with equal graphs, and that of random edges.

    The random edges have as many edges of every pair of kinds of source and destination as the circuit, so that an
    overlap that follows from kinds alone (every circuit has edges from the embedding) is not counted.

    Args:
        one: of a network.
        two: of a network with as many layers and heads.
        draws: random pairs.
        seed: of the draws.

    Raises:
        ValueError: other graphs.
    """
    if one.graph != two.graph:
        raise ValueError(f"the circuits are of {one.graph} and of {two.graph}; give networks of one shape")
    generator = torch.Generator().manual_seed(seed)
    pairs = zip(*(random_edges(circuit, draws, generator) for circuit in (one, two)), strict=True)
    found = torch.tensor([jaccard(*pair) for pair in pairs])
    shares = [circuit.scores.abs() / circuit.scores.abs().sum().clamp(min=1e-30) for circuit in (one, two)]
    weighted = float(torch.minimum(*shares).sum() / torch.maximum(*shares).sum().clamp(min=1e-30))
    low, high = found.quantile(torch.tensor([0.025, 0.975])).tolist()
    return CircuitOverlap(jaccard(one.edges, two.edges), weighted, float(found.mean()), low, high, draws)


def jaccard(one: Bool[Tensor, "source destination"], two: Bool[Tensor, "source destination"]) -> float:
    """Edges in both / edges in either; NaN if both are empty."""
    either = int((one | two).sum())
    return int((one & two).sum()) / either if either else float("nan")


def random_edges(
    circuit: Circuit, draws: int, generator: torch.Generator
) -> Bool[Tensor, "draw source destination"]:
    """As many random edges of every pair of kinds as a circuit has, several times."""
    sources, ends = circuit.graph.kinds
    found = torch.zeros(draws, circuit.edges.numel(), dtype=torch.bool)
    for start in dict.fromkeys(sources):
        for end in dict.fromkeys(ends):
            block = torch.tensor([s == start for s in sources])[:, None] & torch.tensor([e == end for e in ends])
            places = (block & circuit.graph.exists).flatten().nonzero().flatten()
            count = int((circuit.edges & block).sum())
            order = torch.rand(draws, len(places), generator=generator, dtype=torch.float32).argsort(-1)
            found.scatter_(1, places[order[:, :count]], torch.ones(draws, count, dtype=torch.bool))
    return found.unflatten(1, tuple(circuit.edges.shape))
