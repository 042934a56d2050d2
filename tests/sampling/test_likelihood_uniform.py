"""The likelihood of models of uniform noise: Duo's own losses, an exact entropy, and canvases drawn by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.nelbo import UniformCorruption, nelbo
from dlm_lens.sampling.likelihood.noisy_texts import NoisyQuery, NoisyScorer, drawn_texts
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "duo"
LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]
UDLM = json.loads((GOLDEN.parent / "udlm" / "loss.json").read_text())["entries"]
NOTHING = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize("entry", [*LOSSES, *UDLM])
def test_the_noise_of_the_loss_is_the_originals(entry: dict[str, Any]) -> None:
    """Times, replaced positions and random tokens; the original's batch is here the samples of one item."""
    clean = torch.tensor(entry["x0"])
    generator = torch.Generator().manual_seed(entry["seed"])
    config, pair = SimpleNamespace(vocab_size=71), Pair(NOTHING, clean[0])
    noisy, alphas, _ = drawn_texts(UniformCorruption(), pair, config, 3, generator)
    assert ((1 - alphas) / 0.999).tolist() == pytest.approx(entry["t"], rel=1e-6)
    stored = torch.tensor(entry["xt"])
    replaced = stored != clean
    assert noisy[replaced].equal(stored[replaced])
    assert noisy[0].equal(stored[0])


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: str(entry["seed"]))
@torch.no_grad()
def test_every_loss_is_the_originals(entry: dict[str, Any]) -> None:
    model, clean, noisy = loaded(GOLDEN), torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    every = torch.ones(12, dtype=torch.bool)
    queries = []
    for row, time in enumerate(entry["t"]):
        alpha = 1 - 0.999 * time
        queries.append(
            NoisyQuery(
                row, Pair(NOTHING, clean[row]), every, every, sigma=-math.log(alpha), noisy=noisy[row], level=alpha
            )
        )
    losses = torch.stack([loss for _, loss in NoisyScorer(model, integrand=nelbo).losses(queries)])
    # The original's function in float64, of the same float32 network: its float32 is up to 1e-5 off.
    wide = torch.tensor(entry["loss_per_token_float64"], dtype=torch.float64)
    torch.testing.assert_close(losses, wide, atol=1e-4, rtol=1e-5)
    assert float(losses.mean()) == pytest.approx(entry["mean"], rel=1e-5)
    assert float(losses.max()) > 10


def test_the_integral_of_the_loss_of_a_perfect_network_is_the_entropy_of_the_data() -> None:
    """A text of one token with known probabilities: the bound has no gap.

    X_theta is what the other tokens tell, here nothing: the probabilities of the data, whatever x_t is. (The
    prediction p(x_0 | x_t), which reads the token itself, would count it twice.)
    """
    chance = torch.tensor([0.5, 0.2, 0.2, 0.07, 0.03], dtype=torch.float64)
    size, points = len(chance), 4000
    nodes = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    times = nodes**2  # more of them near 0, where the loss changes fastest
    total = 0.0
    for token in range(size):
        for seen in range(size):
            alpha = 1 - 0.999 * times
            noise = (1 - alpha) / size
            forwards = noise[:, None] + alpha[:, None] * torch.eye(size, dtype=torch.float64)[seen]  # q(x_t | x)
            logs = chance.log().expand(points, size)
            loss = nelbo(logs, torch.full((points,), seen), torch.full((points,), token), alpha)
            assert (loss > -1e-9).all()
            total += float((chance[token] * forwards[:, token] * loss * 2 * nodes / points).sum())
    entropy = -float((chance * chance.log()).sum())
    # The text at t = 1 is not quite noise (alpha = 1e-3), which the original leaves out too: 1e-6 nats.
    assert total == pytest.approx(entropy, abs=2e-4)


def test_text_without_noise_has_the_limit_of_the_loss() -> None:
    """At a time of 0, which `eps=0` can draw, 0 ln 0 was not a number; at alpha = 1 the loss is (1/x_i - 1) / V."""
    logs = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).double().log_softmax(-1)
    tokens = torch.tensor([1, 2, 3])
    found = nelbo(logs, tokens, tokens, torch.ones(3))
    own = logs[torch.arange(3), tokens].exp()
    torch.testing.assert_close(found, (1 - 1e-3) * (1 / own - 1) / 7, atol=1e-12, rtol=1e-12)
    near = nelbo(logs, tokens, tokens, torch.full((3,), 1 - 1e-9, dtype=torch.float64))
    torch.testing.assert_close(found, near, atol=1e-6, rtol=1e-6)


def test_a_certain_and_right_prediction_costs_nothing() -> None:
    logs = torch.full((2, 6), -1e4, dtype=torch.float64).scatter(-1, torch.tensor([[2], [2]]), 0.0)
    loss = nelbo(logs, torch.tensor([2, 5]), torch.tensor([2, 2]), torch.tensor([0.3, 0.6]))
    torch.testing.assert_close(loss, torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    wrong = nelbo(logs, torch.tensor([2, 5]), torch.tensor([3, 3]), torch.tensor([0.3, 0.6]))
    assert (wrong > 1).all()


@pytest.mark.parametrize("conditioned", [True, False])
def test_the_likelihood_is_the_mean_over_random_tokens(conditioned: bool) -> None:
    """Times, positions and tokens drawn by hand, a float64 network, and the sum over tokens written out."""
    model, prompt, answer = tiny("duo", time_conditioning=conditioned), [5, 9], [14, 3, 8]
    found = dl.log_likelihood(model, prompt, answer, samples=6, strata=3, seed=7)
    generator, losses = torch.Generator().manual_seed(7), []
    for _ in range(2):
        start = torch.rand(3, generator=generator)
        times = [0.999 * float((start[i] / 3 + i / 3) % 1) + 1e-3 for i in range(3)]
        uniform, random = torch.rand(3, 5, generator=generator), torch.randint(64, (3, 5), generator=generator)
        for row, t in enumerate(times):
            ids = prompt + [
                int(random[row, 2 + i]) if uniform[row, 2 + i] < 0.999 * t else answer[i] for i in range(3)
            ]
            alpha = 1 - 0.999 * t
            logits = dit64(model, torch.tensor([ids]), sigma=-math.log(alpha) if conditioned else 0.0)["logits"][0]
            likely = logits.softmax(-1)
            total = 0.0
            for i, token in enumerate(answer):
                text = [64 * alpha * (j == token) + 1 - alpha for j in range(64)]
                guess = (64 * alpha * likely[2 + i] + 1 - alpha).tolist()
                seen = ids[2 + i]
                inside = sum(
                    text[j] / text[seen] * math.log(text[j] * guess[seen] / (text[seen] * guess[j]))
                    for j in range(64)
                )
                total += 0.999 / (64 * alpha) * (64 / guess[seen] - 64 / text[seen] + inside)
            losses.append(total)
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-4)
    assert found.value.item() == pytest.approx(-sum(losses) / 6, rel=1e-4)
    assert found.method == "mc"


@pytest.mark.parametrize("family", ["duo", "gidd_dit", "sumi", "udlm"])
def test_items_do_not_depend_on_their_batch(family: str) -> None:
    model = tiny(family)
    prompts, answers = [[5, 9], [], [1]], [[14, 3, 8], [7, 7], [2, 9, 4, 4]]
    together = dl.log_likelihood(model, prompts, answers, samples=8, seed=[1, 2, 3])
    single = dl.log_likelihood(model, prompts, answers, samples=8, seed=[1, 2, 3], batch_size=1)
    torch.testing.assert_close(together.value, single.value, atol=1e-4, rtol=1e-5)
    for item, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone = dl.log_likelihood(model, [prompt], [answer], samples=8, seed=item + 1)
        # The network's float32 sums differ with the shape of a batch.
        assert float(alone) == pytest.approx(float(together.value[item]), rel=1e-4)
    both = dl.log_likelihood(model, [[5, 9]], [[14, 3, 8]], samples=8, seed=1, scope="both")
    assert float(both.value) < float(together.value[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "chain_rule"}, r"method='chain_rule' hides tokens with \[MASK\]"),
        ({"method": "greedy_completion"}, "use method='mc'"),
        ({"cfg_scale": 1.0}, r"cfg_scale=1.0 hides tokens with \[MASK\]"),
        ({"scope": "prompt"}, "scope is 'prompt'"),
    ],
)
def test_what_needs_a_mask_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.log_likelihood(tiny("duo"), "w3", "w4", **given)
