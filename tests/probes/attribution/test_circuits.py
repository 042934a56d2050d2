"""Circuits: paths by enumeration, exact runs of none and all edges, and overlaps of known sets."""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import Circuit, LogProbability, circuit_overlap, faithfulness
from dlm_lens.probes.attribution.circuits import random_edges
from dlm_lens.probes.attribution.edge_graph import EdgeGraph
from dlm_lens.testing import tiny
from tests.probes.attribution.test_patching import FAMILIES, OTHERS, PROMPTS

GRAPH = EdgeGraph(layers=2, heads=4, kv_heads=2)


def test_pruning_keeps_the_edges_on_paths() -> None:
    generator = torch.Generator().manual_seed(1)
    inner = GRAPH.inner
    for share in (0.05, 0.1, 0.2):
        edges = (torch.rand(GRAPH.exists.shape, generator=generator) < share) & GRAPH.exists

        @cache
        def from_input(source: int, edges: Any = edges) -> bool:
            ends = [d for d in range(len(inner)) if inner[d, source]]
            return source == 0 or any(edges[s, d] and from_input(s) for d in ends for s in range(source))

        @cache
        def to_logits(destination: int, edges: Any = edges) -> bool:
            if destination == len(inner) - 1:
                return True
            later = [s for s in range(len(edges)) if inner[destination, s]]
            return any(edges[s, d] and to_logits(d) for s in later for d in range(len(inner)))

        wanted = edges.clone()
        for source, destination in edges.nonzero().tolist():
            wanted[source, destination] = from_input(source) and to_logits(destination)
        assert GRAPH.on_paths(edges).equal(wanted)
        assert not wanted.equal(edges)


def test_edges_come_from_earlier_parts_alone() -> None:
    exists = {(GRAPH.sources[i], GRAPH.destinations[j]) for i, j in GRAPH.exists.nonzero().tolist()}
    assert ("a0.h3", "m0") in exists
    assert ("m0", "a1.h0<k>") in exists
    assert ("m1", "logits") in exists
    assert not exists & {("a0.h0", "a0.h1<q>"), ("m0", "m0"), ("a1.h0", "m0"), ("m1", "a1.h1<v>")}
    assert len(exists) == 8 + 5 + 8 * 6 + 10 + 11


@pytest.mark.parametrize("family", FAMILIES)
def test_no_edge_is_the_other_run_and_all_edges_are_the_base(family: str) -> None:
    model = tiny(family).double()
    run = dl.denoise(model, PROMPTS, **FAMILIES[family])
    for edges, name in ((torch.zeros_like(GRAPH.exists), "source"), (GRAPH.exists, "base")):
        circuit = Circuit(GRAPH, edges, GRAPH.exists.float(), 1)
        found = faithfulness(model, run, OTHERS, circuit, steps=[-1], target=LogProbability())
        # The norms compute in float32.
        torch.testing.assert_close(found.kept, getattr(found, name), atol=1e-5, rtol=1e-5)
        assert float((found.base - found.source).abs().max()) > 1e-3


def test_overlap_of_equal_random_and_other_circuits() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(GRAPH.exists.shape, generator=generator) * GRAPH.exists
    one = Circuit.of_scores(GRAPH, scores, 30)
    same = circuit_overlap(one, one, draws=200)
    assert (same.jaccard, same.weighted) == (1.0, pytest.approx(1.0))
    assert same.null_high < 0.8
    kinds = GRAPH.kinds
    named = [{"e": "embed", "a": "head", "m": "mlp"}[name[0]] for name in GRAPH.sources]
    assert kinds[0] == tuple(named)
    assert named.count("mlp") == 2
    for edges in random_edges(one, 5, generator):
        for source, destination in itertools.product(set(kinds[0]), set(kinds[1])):
            block = torch.tensor([[a == source and b == destination for b in kinds[1]] for a in kinds[0]])
            assert int((edges & block).sum()) == int((one.edges & block).sum())
        assert not (edges & ~GRAPH.exists).any()
    signed = Circuit.of_scores(GRAPH, 0.5 - scores, 30)
    sizes = [(each.scores / each.scores.abs().sum()).abs().flatten().tolist() for each in (one, signed)]
    pairs = list(zip(*sizes, strict=True))
    weighted = sum(map(min, pairs)) / sum(map(max, pairs))
    overlap = circuit_overlap(one, signed, draws=200)
    assert overlap.weighted == pytest.approx(weighted, rel=1e-5)
    assert overlap.null_low <= overlap.null <= overlap.null_high
    inside = []
    for edges in random_edges(one, 40, generator):
        other = Circuit(GRAPH, edges, scores, 30)
        found = circuit_overlap(one, other, draws=100, seed=1)
        inside.append(found.null_low <= found.jaccard <= found.null_high)
    assert sum(inside) >= 32  # 95% of 40 is 38
    rest = Circuit(GRAPH, GRAPH.exists & ~one.edges, 1 - scores, 1)
    assert circuit_overlap(one, rest, draws=10).jaccard == 0.0
    with pytest.raises(ValueError, match="networks of one shape"):
        circuit_overlap(one, Circuit.of_scores(EdgeGraph(1, 4, 2), torch.ones(6, 10), 3))
    with pytest.raises(ValueError, match="give 1 to 82"):
        Circuit.of_scores(GRAPH, scores, 83)
