"""Figures 5 and 10: trends over all layers against permuted layers; the share above eps in every reading."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from dlm_lens.experiments.attention_sinks import fig5_depth, fig10_eps
from dlm_lens.experiments.results import Record, Results
from dlm_lens.sinks import Received, eps_sweep
from tests.experiments.finished_runs import finished_run


def depth(curves: list[list[list[float]]]) -> Results:
    """Results of networks, each with prompts, each with a curve of positions; the score is its negative."""
    records = [
        Record(
            {"model": "toy", "network": number, "start": 0},
            {"relative positions": network, "relative score": [[[-x] * 2 for x in one] for one in network]},
            0.0,
        )
        for number, network in enumerate(curves)
    ]
    return finished_run({"settings": {}}, records)


def test_trend_is_the_mean_of_spearman_s_correlations() -> None:
    draw = np.random.default_rng(0)
    prompts = [(draw.integers(0, 4, size=7) / 2).tolist() for _ in range(9)]  # with ties
    theirs = [stats.spearmanr(one, range(7)).statistic for one in prompts]
    found = fig5_depth.trend(depth([prompts]), "toy", "relative", "positions")
    assert found.value == pytest.approx(np.mean(theirs))
    assert fig5_depth.trend(depth([[[1.0] * 7]]), "toy", "relative", "positions").value == 0


def test_permutations_are_those_of_every_network_s_layers() -> None:
    draw = np.random.default_rng(1)
    networks = [[draw.random(3).tolist() for _ in range(4)] for _ in range(2)]
    _, p = fig5_depth.permuted(depth(networks), "toy", "relative", "positions")

    def mean(orders: list[tuple[int, ...]]) -> float:
        return float(np.mean([
            np.mean([stats.spearmanr([one[layer] for layer in order], range(3)).statistic for one in network])
            for network, order in zip(networks, orders, strict=True)
        ]))  # fmt: skip

    every = list(itertools.product(itertools.permutations(range(3)), repeat=2))
    real = abs(mean([(0, 1, 2)] * 2))
    assert p == pytest.approx(np.mean([abs(mean(list(orders))) >= real - 1e-9 for orders in every]))


def test_random_permutations_agree_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = depth([[[3.0, 1, 2, 0, 1.5, 0.5]] * 4])
    every = fig5_depth.permuted(curves, "toy", "relative", "positions")
    monkeypatch.setattr(fig5_depth, "PERMUTATIONS", 300)
    drawn = fig5_depth.permuted(curves, "toy", "relative", "positions")
    assert drawn[1] == pytest.approx(every[1], abs=0.06)
    assert drawn[0] == pytest.approx(every[0], abs=0.1)


def test_four_layers_of_one_network_decide_nothing() -> None:
    falling = [[4.0, 3, 2, 1.0 + 0.1 * n] for n in range(8)]
    positions, score = fig5_depth.findings(depth([falling]))
    assert (positions.verdict, score.verdict) == ("undecided", "undecided")
    assert positions.p == pytest.approx(2 / 24)
    assert "the least p of 4 layers is 0.08" in positions.why
    # Three networks with the same trend, or one of seven layers, decide.
    assert [one.verdict for one in fig5_depth.findings(depth([falling] * 3))] == ["agrees", "agrees"]
    deep = [[7.0 - layer + 0.1 * n for layer in range(7)] for n in range(8)]
    assert [one.verdict for one in fig5_depth.findings(depth([deep]))] == ["agrees", "agrees"]
    rising = [curve[::-1] for curve in deep]
    assert [one.verdict for one in fig5_depth.findings(depth([rising]))] == ["disagrees", "disagrees"]


SETTINGS = {"values": [0.0, 1.0, 3.0], "shares": [0.02, 0.5]}


def received(values: np.ndarray, even: np.ndarray) -> Received:
    return Received(
        values=torch.tensor(values).float(),
        expected=torch.tensor(even).float().expand(len(values), 1, 1, 1, -1).clone(),
        counted=torch.full((len(values), 1), round(float(even.sum()))),
        layers=(0,),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_every_reading_is_eq_3_on_its_own_scores(causal: bool) -> None:
    n = 20
    even = np.array([sum(1 / i for i in range(j, n + 1)) for j in range(1, n + 1)]) if causal else np.ones(n)
    scores = np.random.default_rng(2).exponential(size=(3, 1, 1, 2, n)) ** 2
    scores *= n / (scores * even).sum(-1, keepdims=True)
    given = received(scores, even)
    for reading in fig10_eps.READINGS:
        kept, keys = fig10_eps.sweep(given, reading, SETTINGS)
        assert keys == 3 * 2 * n
        values = {"relative": scores, "column sums": scores * even}.get(reading, scores * even / n)
        eps = SETTINGS["shares"] if reading == "literal" else SETTINGS["values"]
        eps = [one / 100 for one in eps] if reading == "percent" else eps
        above = [np.mean(values > (values.sum(-1, keepdims=True) - values) / (n - 1) + one) for one in eps]
        np.testing.assert_allclose(kept, above, atol=1e-6)


def test_sweep_is_the_library_s() -> None:
    scores = np.random.default_rng(3).exponential(size=(4, 1, 1, 3, 24)) ** 2
    scores[1, ..., 20:] = np.nan
    given = received(scores, np.ones(24))
    table = eps_sweep(given, SETTINGS["values"])
    kept, n = fig10_eps.sweep(given, "relative", SETTINGS)
    np.testing.assert_allclose(kept, table["kept"], atol=1e-6)
    assert n == table["n"][0]


def test_exponential_scores_have_their_closed_form_above_eps() -> None:
    n = 40
    given = received(np.ones((60, 1, 1, 8, n)), np.ones(n))
    drawn = fig10_eps.exponential_like(given, 0)
    np.testing.assert_allclose(drawn.column_sums.sum(-1).numpy(), n, rtol=1e-5)
    kept, _ = fig10_eps.sweep(drawn, "relative", SETTINGS)
    # s_j > mean of the others + eps: s_j > 1 + eps (n - 1) / n; P(s_j > x) = (1 - x / n)^(n - 1).
    expected = [(1 - (1 + eps * (n - 1) / n) / n) ** (n - 1) for eps in SETTINGS["values"]]
    np.testing.assert_allclose(kept, expected, atol=0.01)
    even = np.array([sum(1 / i for i in range(j, n + 1)) for j in range(1, n + 1)])
    causal = fig10_eps.exponential_like(received(np.ones((2, 1, 1, 2, n)), even), 0)
    np.testing.assert_allclose(causal.column_sums.sum(-1).numpy(), n, rtol=1e-5)


@pytest.mark.parametrize(("kept", "verdict"), [(0.01, "agrees"), (0.06, "disagrees")])
def test_the_paper_s_share_is_judged_in_every_reading(kept: float, verdict: str) -> None:
    values: dict[str, list] = {"length": [50] * 5, "n": [1000 + number for number in range(5)]}
    for reading in fig10_eps.READINGS:
        size = 2 if reading == "literal" else 3
        values[f"measured {reading}"] = [[kept + 0.001 * number] * size for number in range(5)]
        values[f"exponential {reading}"] = [[0.018] * size] * 5
    found = finished_run({"settings": SETTINGS}, [Record({"model": "toy-ar", "start": 0}, values, 0.0)])
    findings = list(fig10_eps.findings(found))
    assert [one.verdict for one in findings] == [verdict] * 3 + ["no counterpart"]
    assert all("exponential scores: 0.982" in one.null for one in findings[:3])
    found = finished_run({"settings": SETTINGS}, [Record({"model": "toy", "start": 0}, values, 0.0)])
    assert len(list(fig10_eps.findings(found))) == 3  # column sums are the relative scores
