"""Comparisons of two networks' circuits over the same groups of prompts."""

from typing import Any

import numpy as np
import pytest

from dlm_lens.experiments.denoising_axis.axis_circuits import EXPERIMENT, early_share, more_early, overlap
from dlm_lens.experiments.denoising_axis.page import RESULTS
from dlm_lens.experiments.intervals import difference_of_ratios
from dlm_lens.experiments.runner import load_results
from dlm_lens.experiments.verdicts import is_above
from dlm_lens.probes.attribution.edge_graph import EdgeGraph

GRAPH = (2, 2, 2)
EDGES = int(EdgeGraph(*GRAPH).exists.sum())


def scores(rng: np.random.Generator, groups: int = 8, early: float = 0.0) -> dict[str, Any]:
    """A record of which the share of early edges has one true value, but for `early`."""
    graph = EdgeGraph(*GRAPH)
    first = graph.exists.nonzero()[:, 1].numpy() <= graph.mlp_input_at(graph.layers // 2 - 1)
    return {"graph": list(GRAPH), "scores": np.abs(1 + 0.3 * rng.normal(size=(groups, EDGES)) + early * first)}


def test_equal_truths_are_undecided() -> None:
    rng = np.random.default_rng(0)
    verdicts = [is_above(more_early(scores(rng), scores(rng)), 0.0).verdict for _ in range(200)]
    # A comparison with one end of the other's interval was "disagrees" in half of the cases.
    assert verdicts.count("undecided") > 160
    assert verdicts.count("disagrees") < 24
    assert is_above(more_early(scores(rng, early=0.2), scores(rng)), 0.0).verdict == "agrees"
    assert is_above(more_early(scores(rng), scores(rng, early=0.2)), 0.0).verdict == "disagrees"


def test_the_difference_is_that_of_the_shares() -> None:
    rng = np.random.default_rng(1)
    one, other = scores(rng), scores(rng, early=0.1)
    found = more_early(one, other)
    assert found.value == pytest.approx(early_share(one).value - early_share(other).value)
    # What both have in common cancels: a network minus itself is 0 in every draw.
    assert more_early(one, one)[:3] == (0.0, 0.0, 0.0)


def test_a_difference_of_ratios_is_over_the_same_draws() -> None:
    rng = np.random.default_rng(2)
    one, other = (tuple(rng.uniform(1, 2, size=(2, 40))) for _ in range(2))
    found = difference_of_ratios(one, other, seed=5, bounds=(-1, 1))

    def apart(at: Any) -> float:
        return float(one[0][at].sum() / one[1][at].sum() - other[0][at].sum() / other[1][at].sum())

    drawn = [apart(rng.integers(40, size=40)) for _ in range(4000)]
    assert found.value == pytest.approx(apart(slice(None)))
    np.testing.assert_allclose(found[1:3], np.quantile(drawn, (0.025, 0.975)), atol=0.02)
    with pytest.raises(ValueError, match="40 and 39 prompts cannot be paired"):
        difference_of_ratios(one, (other[0][1:], other[1][1:]), bounds=(-1, 1))
    assert np.isnan(difference_of_ratios(([], []), ([], []), bounds=(-1, 1)).value)
    assert np.isnan(difference_of_ratios(([1.0], [2.0]), ([1.0], [4.0]), bounds=(-1, 1)).low)


def test_overlaps_are_paired_by_group() -> None:
    rng = np.random.default_rng(3)
    parent, one, two = (scores(rng) for _ in range(3))
    found = [overlap(parent, each, EDGES // 2) for each in (one, two)]
    assert found[0].minus(found[0])[:3] == (0.0, 0.0, 0.0)
    apart = found[0].minus(found[1])
    assert apart.value == pytest.approx(found[0].jaccard.value - found[1].jaccard.value)
    assert found[1].minus(found[0])[:3] == pytest.approx((-apart.value, -apart.high, -apart.low))
    with pytest.raises(ValueError, match="8 and 6 groups of prompts cannot be paired"):
        found[0].minus(overlap(scores(rng, 6), scores(rng, 6), EDGES // 2))


def test_the_stored_comparisons_are_of_differences() -> None:
    rendering = EXPERIMENT.render(load_results(EXPERIMENT, RESULTS / EXPERIMENT.name))
    early = next(one for one in rendering.findings if "early layers" in one.paper)
    assert "difference -0.04 [" in early.here
    assert early.verdict == "disagrees"
