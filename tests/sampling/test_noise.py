"""Random numbers of rows: the distributions that samplers draw from, and what positions without a draw hold."""

import pytest
import torch

from dlm_lens.sampling.noise import Noise, RowNoise, SharedNoise

ROWS = 4000
WEIGHTS = torch.tensor([0.0, 1.5, -1.0, 0.7, 9.0])
ELIGIBLE = torch.tensor([True, True, True, True, False])


def test_positions_are_drawn_without_replacement_by_the_softmax_of_their_weights() -> None:
    p = WEIGHTS.double().exp() * ELIGIBLE
    p = (p / p.sum()).tolist()
    pairs = {(i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i in range(4) for j in range(i + 1, 4)}
    wanted = {1: {(i,): p[i] for i in range(4)}, 2: pairs}
    for count, shares in wanted.items():
        drawn = RowNoise(tuple(range(ROWS))).draw(
            WEIGHTS.expand(ROWS, -1), ELIGIBLE.expand(ROWS, -1), torch.full((ROWS,), count)
        )
        sets = [tuple(row.nonzero().flatten().tolist()) for row in drawn]
        for chosen, share in shares.items():
            assert sets.count(chosen) / ROWS == pytest.approx(share, abs=4 * (share * (1 - share) / ROWS) ** 0.5)
        assert sum(shares.values()) == pytest.approx(1)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 2.0])  # up to a factor
    here = torch.ones(ROWS, 1, dtype=torch.bool)
    drawn = RowNoise(tuple(range(ROWS))).tokens(probabilities.expand(ROWS, -1), here, here)
    counts = drawn.bincount(minlength=4) / ROWS
    torch.testing.assert_close(counts, probabilities / 2.8, rtol=0, atol=4 * (0.25 / ROWS) ** 0.5)
    assert int(counts[1]) == 0


@pytest.mark.parametrize("noise", [RowNoise((3, 4)), SharedNoise(3)])
def test_positions_that_nothing_is_drawn_for_hold_what_the_protocol_says(noise: Noise) -> None:
    wanted = torch.rand(2, 400, generator=torch.Generator().manual_seed(0)) < 0.5
    numbers, tokens = noise.masked_positions(wanted), noise.uniform_tokens(wanted, 7)
    assert bool((numbers[~wanted] == 1).all())
    assert bool((numbers[wanted] < 1).all())
    assert float(numbers[wanted].mean()) == pytest.approx(0.5, abs=0.06)  # 4 standard errors
    assert bool((tokens[~wanted] == 0).all())
    assert tokens[wanted].unique().tolist() == list(range(7))


def test_tokens_are_drawn_a_few_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any parts: the numbers of each row's generator for its eligible positions, in their order."""
    evaluated = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) < 0.5
    eligible = evaluated & (torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.7)
    count = int(evaluated.sum())
    assert 3 < int(eligible.sum()) < count
    probabilities = torch.rand(count, 50, generator=torch.Generator().manual_seed(0))
    wanted = []
    generators = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    for entry, (row, position) in enumerate(evaluated.nonzero().tolist()):
        scores = probabilities[entry].double().log()
        if eligible[row, position]:
            u = torch.rand(1, 50, generator=generators[row], dtype=torch.float64)[0]
            scores = scores - (-u.log()).log()
        wanted.append(int(scores.argmax()))
    for entries in (50, 149, 2**22):
        monkeypatch.setattr("dlm_lens.sampling.noise.ENTRIES", entries)
        noise = RowNoise((7, 8, 9))
        assert noise.tokens(probabilities, evaluated, eligible).tolist() == wanted
        for one, two in zip(noise.generators, generators, strict=True):
            assert torch.equal(one.get_state(), two.get_state())
    none = torch.zeros(3, 9, dtype=torch.bool)
    assert RowNoise((7, 8, 9)).tokens(probabilities[:0], none, none).tolist() == []
