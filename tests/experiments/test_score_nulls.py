"""The nulls of Figures 3 and 9: closed forms, planted distributions, and the bias that the margin allows for."""

from statistics import NormalDist

import numpy as np
import pytest

from dlm_lens.experiments.attention_sinks.fig3_distribution import EDGES, MARGIN, concentration, nulls, top_count


def harmonic(n: int, start: int = 1) -> float:
    return sum(1 / j for j in range(start, n + 1))


def even_attention(n: int) -> tuple[float, ...]:
    """e_j of a causal pattern of n queries: sum_{i >= j} 1 / i."""
    return tuple(harmonic(n, j) for j in range(1, n + 1))


def test_concentration_of_patterns_that_are_known() -> None:
    n = 50
    one = np.full(n, 0.2)
    one[7] = 0.2 * 51
    found = concentration(np.stack([np.ones(n), one, np.arange(1.0, n + 1)]))
    # One key has half of everything and the second of the top two 1/100 of it; the others are equal.
    np.testing.assert_allclose(found.top, [0.04, 0.51 + 0.01, (50 + 49) / (50 * 51 / 2)])
    np.testing.assert_allclose(found.median, [1, 0.5, 1])
    np.testing.assert_allclose(found.gini, [0, (0.51 - 1 / 50), (50 * 50 - 1) / (3 * 50 * 51)], atol=1e-12)
    assert [top_count(n) for n in (5, 37, 38, 50, 64)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("n", [20, 50])
def test_exponential_null_has_its_closed_form(n: int) -> None:
    found = nulls(n)
    # Order statistics of exponentials, divided by their mean (independent of the sum): E x_(n-i+1) = H_n - H_{i-1}.
    k = top_count(n)
    assert found.exponential.top == pytest.approx(sum(harmonic(n, i) for i in range(1, k + 1)) / n, abs=0.004)
    middle = np.mean([harmonic(n, n - place + 1) for place in (n // 2, n // 2 + 1)])
    assert found.exponential.median == pytest.approx(middle, abs=0.01)
    assert found.exponential.gini == pytest.approx((n - 1) / (2 * n), abs=0.004)
    # P(share > x) = (1 - x)^(n - 1), uniform on the simplex.
    edges = np.minimum(EDGES, 1)
    above = (1 - edges) ** (n - 1)
    np.testing.assert_allclose(found.exponential_counts, n * (above[:-1] - above[1:]), atol=0.15)
    assert (found.uniform.median, found.uniform.gini) == (1, 0)


def test_uniform_attention_of_a_causal_mask_is_no_flat_column_sum() -> None:
    even = even_attention(50)
    found = nulls(even)
    assert found.uniform.top == pytest.approx((harmonic(50) + harmonic(50, 2)) / 50)
    # Exponential scores on top of it are more concentrated than either.
    assert found.exponential.top > max(found.uniform.top, nulls(50).exponential.top) + 0.05


@pytest.mark.parametrize("n", [20, 50, 150])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0, 3.0])
def test_lognormal_scores_are_not_above_their_own_null(n: int, sigma: float) -> None:
    drawn = np.exp(sigma * np.random.default_rng(5).standard_normal((2000, n)))
    found = concentration(drawn)
    top, gini = nulls(n).conditional(found.median)
    assert abs(float((found.top - top).mean())) < MARGIN
    assert abs(float((found.gini - gini).mean())) < MARGIN
    if (
        n == 150 and sigma <= 1
    ):  # finite samples of heavier tails have less in their top; near the population's share, 1 - Phi(z - sigma)
        population = 1 - NormalDist().cdf(NormalDist().inv_cdf(1 - top_count(n) / n) - sigma)
        assert float(top.mean()) == pytest.approx(population, abs=0.06)


def test_sinks_on_a_flat_ground_are_above_the_lognormal() -> None:
    """Two keys with half of the attention, the rest exponential: more in the top than a smooth tail has."""
    generator = np.random.default_rng(0)
    planted = generator.exponential(size=(500, 50))
    planted[:, [3, 9]] = planted.sum(1, keepdims=True) / 2
    found = concentration(planted)
    top, _ = nulls(50).conditional(found.median)
    assert float((found.top - top).mean()) > MARGIN + 0.05
    # A plain exponential is not.
    plain = concentration(generator.exponential(size=(500, 50)))
    assert float((plain.top - nulls(50).conditional(plain.median)[0]).mean()) < 0


def test_lognormal_counts_are_those_of_their_sigma() -> None:
    drawn = np.exp(1.5 * np.random.default_rng(1).standard_normal((400, 50)))
    counts = nulls(50).lognormal_counts(concentration(drawn).median)
    shares = drawn / drawn.sum(1, keepdims=True)
    assert counts.sum() == pytest.approx(400 * 50)
    tail = [float(part[EDGES[:-1] >= 0.1].sum()) for part in (counts, np.histogram(shares, EDGES)[0])]
    assert tail[0] == pytest.approx(tail[1], rel=0.1)
