"""Noise of masks and random tokens: the posterior from transition matrices, draws, and the first canvas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.sampling.noise import RowNoise
from dlm_lens.sampling.samplers.mixed_noise import MixedNoiseSampler, MixedPropose, Mixture, mixed_posterior
from dlm_lens.sampling.samplers.uniform_posterior import Levels, posterior

SIZE, MASK = 9, 6


def mixture(alpha: float, masked: float) -> Mixture:
    """A noise level from two of its numbers."""
    return Mixture(*(torch.tensor(share, dtype=torch.float64) for share in (alpha, masked, 1 - alpha - masked)))


def noise_row(level: Mixture) -> Tensor:
    """What the noise writes at a position."""
    row = torch.full((SIZE,), float(level.random) / (SIZE - 1), dtype=torch.float64)
    row[MASK] = float(level.masked)
    return row


def mixed_bayes(likely: Tensor, seen: Tensor, now: Mixture, then: Mixture) -> Tensor:
    """Q(x_s | x_t, x_theta) from full transition matrices [from, to]: no formula of the library.

    The matrix from s to t solves (to s) (s to t) = (to t), as the process is Markov.
    """
    eye = torch.eye(SIZE, dtype=torch.float64)
    to_t, to_s = (float(level.alpha) * eye + noise_row(level)[None] for level in (now, then))
    between = torch.linalg.solve(to_s, to_t)
    torch.testing.assert_close(between.sum(-1), torch.ones(SIZE, dtype=torch.float64), atol=1e-9, rtol=0)
    assert float(between.min()) > -1e-12
    joint = (likely @ to_s) * between[:, seen].T
    return joint / joint.sum(-1, keepdim=True)


def mixed_bayes_of(
    likely: Tensor, seen: Tensor, now: tuple[float, float, float], then: tuple[float, float, float], mask: int
) -> Tensor:
    """The same in a vocabulary of another size, from shares of the text, of masks and of random tokens."""
    size = likely.shape[-1]
    rows = []
    for alpha, masked, random in (now, then):
        noise = torch.full((size,), random / (size - 1), dtype=torch.float64)
        noise[mask] = masked
        rows.append(alpha * torch.eye(size, dtype=torch.float64) + noise)
    between = torch.linalg.solve(rows[1], rows[0])
    joint = (likely @ rows[1]) * between[:, seen].T
    return joint / joint.sum(-1, keepdim=True)


def predictions() -> tuple[Tensor, Tensor]:
    """Probabilities without [MASK], two of them certain, and tokens of the canvas, [MASK] among them."""
    logits = 3 * torch.randn(7, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, MASK] = -torch.inf
    likely = logits.softmax(-1)
    likely[5:] = torch.eye(SIZE, dtype=torch.float64)[[2, 5]]
    return likely, torch.tensor([0, 3, MASK, 8, MASK, 2, 2])


LEVELS = [
    ((0.3, 0.5), (0.5, 0.4)),
    ((0.01, 0.9), (0.9, 0.01)),
    ((0.5, 0.2), (0.55, 0.2)),
    ((0.2, 0.8), (0.6, 0.4)),
    ((0.2, 0.0), (0.6, 0.0)),
]
"""Shares of the text and of masks now and then, of noise that only grows."""


@pytest.mark.parametrize(("now", "then"), LEVELS)
def test_the_posterior_is_bayes_rule(now: tuple[float, float], then: tuple[float, float]) -> None:
    likely, seen = predictions()
    levels = mixture(*now), mixture(*then)
    if not float(levels[0].masked):
        seen = seen.where(seen != MASK, 4)  # without masks in the noise none is seen
    if sum(now) == 1:
        seen[6] = 5  # without random tokens none that the network excludes
    weights = mixed_posterior(likely, seen, *levels, MASK)
    expected = mixed_bayes(likely, seen, *levels)
    # Of numbers near 1 the solved matrix has an error of some 1e-16 times its condition, at most 1e3.
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, atol=1e-12, rtol=1e-9)
    total = float(levels[0].alpha) * likely.gather(-1, seen[:, None])[:, 0] + noise_row(levels[0])[seen]
    torch.testing.assert_close(weights.sum(-1), total, atol=1e-14, rtol=1e-12)


def test_without_random_tokens_it_is_mdlms() -> None:
    """A [MASK] stays with the weight 1 - alpha_s, and becomes j with (alpha_s - alpha_t) x_j; a token stays.

    It stays also where the network excludes it, as in the last row.
    """
    likely, seen = predictions()
    weights = mixed_posterior(likely, seen, mixture(0.2, 0.8), mixture(0.7, 0.3), MASK)
    normed = weights / weights.sum(-1, keepdim=True)
    expected = torch.eye(SIZE, dtype=torch.float64)[seen]
    masked = (seen == MASK)[:, None]
    step = (0.7 - 0.2) / 0.8 * likely + 0.3 / 0.8 * torch.eye(SIZE, dtype=torch.float64)[MASK]
    step = step / step.sum(-1, keepdim=True)
    torch.testing.assert_close(normed, torch.where(masked, step, expected), atol=1e-14, rtol=1e-12)


def test_without_masks_it_is_that_of_uniform_noise_over_the_other_ids() -> None:
    """The V - 1 ids other than [MASK] are a vocabulary of their own."""
    likely, seen = predictions()
    seen = seen.where(seen != MASK, 4)
    weights = mixed_posterior(likely, seen, mixture(0.2, 0.0), mixture(0.7, 0.0), MASK)
    others = torch.tensor([j for j in range(SIZE) if j != MASK])
    alphas = (torch.tensor(share, dtype=torch.float64) for share in (0.2, 0.7))
    plain = posterior(likely[:, others], seen - (seen > MASK).long(), Levels(0.0, *alphas))
    assert weights[:, MASK].tolist() == [0.0] * 7
    torch.testing.assert_close(
        weights[:, others] / weights.sum(-1, keepdim=True), plain / plain.sum(-1, keepdim=True),
        atol=1e-14, rtol=1e-12,
    )  # fmt: skip


class Predicts(MixedPropose):
    """Logits are the probabilities' logarithms."""

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.double().softmax(-1)


def test_a_draw_takes_one_number_for_each_position() -> None:
    """The token whose interval of the cumulated posterior holds it, and the text's part of its prior."""
    likely, seen = predictions()
    canvas = torch.cat([seen, seen])[None]
    rows = torch.cat([likely, likely.roll(1, 0)])
    propose = Predicts(MASK, RowNoise((3,)), reference_quirks=False)
    propose.now, propose.then = mixture(0.3, 0.5), mixture(0.5, 0.4)
    everywhere = torch.ones_like(canvas, dtype=torch.bool)
    eligible = everywhere.clone()
    eligible[0, 2] = False  # nothing is written there, and no number is drawn for it
    tokens, confidence = propose(canvas, rows.log(), everywhere, eligible)
    generator, texts = torch.Generator().manual_seed(3), noise_row(propose.then)
    for index in range(14):
        weights = mixed_bayes(rows[index][None], canvas[0, index][None], propose.now, propose.then)[0]
        if index == 2:
            assert int(tokens[0, 2]) == int(weights.argmax())
            assert float(confidence[0, 2]) == -torch.inf
            continue
        left, token = float(torch.rand(1, generator=generator, dtype=torch.float64)), 0
        while left >= float(weights[token]):
            left, token = left - float(weights[token]), token + 1
        assert int(tokens[0, index]) == token
        own = 0.5 * float(rows[index, token])
        assert float(confidence[0, index]) == pytest.approx(own / (own + float(texts[token])), rel=1e-9)


class Mixed(MixedNoiseSampler):
    """The first canvas alone."""

    def __init__(self, noise: Any, first: Mixture) -> None:
        super().__init__(noise)
        self.first = first

    def first_noise(self) -> Mixture:
        return self.first


def first_canvas(level: Mixture) -> tuple[Mixed, Tensor]:
    """Of a sampler after two prompts, one of which holds padding and one a mask, and an answer of 2000 tokens."""
    sampler = Mixed(RowNoise((1, 2)), level)
    prompts = torch.tensor([[0, 3], [MASK, 1]])
    content = torch.ones(2, 2002, dtype=torch.bool)
    content[0, 0] = False
    model = SimpleNamespace(config=SimpleNamespace(mask_token_id=MASK, vocab_size=SIZE))
    return sampler, sampler.begin(model, prompts, content)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_answer_begins_as_noise(share: float) -> None:
    sampler, canvas = first_canvas(mixture(0.0, 1 - share))
    opened = sampler.open_positions(canvas, 0)
    assert opened[:, :2].tolist() == [[False, False], [True, False]]
    assert bool(opened[:, 2:].all())
    assert canvas[:, :2][~opened[:, :2]].tolist() == [0, 3, 1]
    found = canvas[:, 2:]
    # 4000 draws: a share has a standard deviation of at most 0.008.
    assert float((found != MASK).double().mean()) == pytest.approx(share, abs=0.032 if 0 < share < 1 else 0)
    for token in range(SIZE):
        if token != MASK:
            expected = share / (SIZE - 1)
            assert float((found == token).double().mean()) == pytest.approx(expected, abs=0.02 if share else 0)
    again = first_canvas(mixture(0.0, 1 - share))[1]
    assert again.equal(canvas)


def test_a_mask_that_an_edit_writes_is_open() -> None:
    sampler, canvas = first_canvas(mixture(0.0, 0.5))
    state = sampler.state()
    assert bool(state["open"].equal(sampler.open_positions(canvas, 0)))
    sampler.restore({"open": torch.zeros_like(state["open"])})
    edited = torch.zeros_like(canvas)
    edited[:, 1], edited[0, 0] = MASK, MASK  # the first is padding of row 0
    opened = sampler.open_positions(edited, 1)
    assert opened.nonzero().tolist() == [[0, 1], [1, 1]]
    assert sampler.running(opened, SimpleNamespace()).sum(-1).tolist() == [2001, 2002]  # type: ignore[arg-type]
