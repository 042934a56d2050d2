"""The likelihood of mixed noise: GIDD's losses, MDLM's without random tokens, an exact entropy, draws by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.families.gidd_dit import hybrid_rates, hybrid_shares
from dlm_lens.sampling.likelihood.nelbo import mixed_nelbo
from dlm_lens.sampling.likelihood.noisy_texts import drawn_texts
from dlm_lens.sampling.samplers.gidd_dit import HybridCorruption
from dlm_lens.sampling.samplers.mixed_noise import Mixture
from dlm_lens.testing import tiny
from tests.dit64 import dit64

GOLDEN = Path(__file__).parent.parent / "golden" / "gidd_dit"
LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]
SIZE, MASK = 64, 63


def levels(times: Tensor, p_uniform: float) -> tuple[Mixture, Mixture]:
    """The noise, and its derivatives."""
    return Mixture(*hybrid_shares(times, p_uniform)), Mixture(*hybrid_rates(times, p_uniform))


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: str(entry["p_uniform"]))
def test_every_loss_is_the_originals(entry: dict[str, Any]) -> None:
    """`elbo` of GiddLoss in float64, of stored logits, at a mask, the text's token and a random one.

    For a `p_uniform` of 0 the original has exp(-20), which a token of the text pays where the network excludes it.
    """
    logits = load_file(GOLDEN / "loss.safetensors")[f"p{entry['p_uniform']}"].double()
    logits[..., 39] = -torch.inf
    seen, tokens = (torch.tensor(entry[name]) for name in ("z_t", "x"))
    times = torch.tensor(entry["t"], dtype=torch.float64)[:, None].expand(seen.shape).flatten()
    given = (logits.log_softmax(-1).flatten(0, 1), seen.flatten(), tokens.flatten())
    found = mixed_nelbo(*given, *levels(times, max(entry["p_uniform"], math.exp(-20))), 39).reshape(seen.shape)
    # Their B is a float32 number.
    expected = torch.tensor(entry["elbo"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-5)
    kinds = {"mask": seen == 39, "text": seen == tokens, "random": (seen != 39) & (seen != tokens)}
    for kind, here in kinds.items():
        assert bool(here.any()) == (kind != "random" or entry["p_uniform"] > 0)
    assert float(expected.max()) > 10


def test_the_derivatives_are_those_of_the_shares() -> None:
    times = torch.tensor([0.02, 0.3, 0.5, 0.9], dtype=torch.float64)
    for p_uniform in (0.0, 0.2):
        both = (hybrid_shares(times + step, p_uniform) for step in (1e-6, -1e-6))
        for one, other, rate in zip(*both, hybrid_rates(times, p_uniform), strict=True):
            torch.testing.assert_close((one - other) / 2e-6, rate, atol=1e-7, rtol=1e-6)


def test_without_random_tokens_it_is_mdlms() -> None:
    """-ln x_theta / t at a mask, 0 at a token."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 9, generator=generator, dtype=torch.float64)
    logits[:, 6] = -torch.inf
    logs, tokens = logits.log_softmax(-1), torch.tensor([0, 1, 2, 3, 4, 5, 7, 8])
    seen = torch.tensor([6, 6, 2, 6, 4, 6, 7, 6])
    t = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    expected = torch.where(seen == 6, -logs[torch.arange(8), tokens] / t, 0.0)
    found = mixed_nelbo(logs, seen, tokens, Mixture(1 - t, t, zero), Mixture(-one, one, zero), 6)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        mixed_nelbo(logs, seen, tokens, *levels(t, 0.0), 6), expected, atol=1e-12, rtol=1e-12
    )
    excluded = logs.clone()
    excluded[[2, 4, 6], tokens[[2, 4, 6]]] = -torch.inf  # at tokens, of which such a network need know nothing
    assert mixed_nelbo(excluded, seen, tokens, *levels(t, 0.0), 6)[[2, 4, 6]].tolist() == [0.0] * 3
    near = mixed_nelbo(logs, seen, tokens, *levels(t, 1e-9), 6)
    torch.testing.assert_close(near, expected, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("p_uniform", [0.0, 0.2, 0.6])
def test_the_integral_of_the_loss_of_a_perfect_network_is_the_entropy_of_the_data(p_uniform: float) -> None:
    """A text of one token with known probabilities: the bound has no gap. X_theta is what the other tokens tell."""
    chance = torch.tensor([0.5, 0.2, 0.0, 0.2, 0.07, 0.03], dtype=torch.float64)  # the third is [MASK]
    size, mask, points = len(chance), 2, 8000
    nodes = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    ends = nodes**3 + (1 - nodes) ** 3  # more times near the ends, where the loss has square roots
    times, weights = nodes**3 / ends, 3 * (nodes * (1 - nodes)) ** 2 / ends**2 / points
    alpha, masked, random = hybrid_shares(times, p_uniform)
    total = 0.0
    for token in (0, 1, 3, 4, 5):
        for seen in range(size):
            forwards = masked if seen == mask else alpha * (seen == token) + random / (size - 1)
            given = (torch.full((points,), one) for one in (seen, token))
            loss = mixed_nelbo(chance.log().expand(points, size), *given, *levels(times, p_uniform), mask)
            costs = (forwards * loss).where(forwards > 0, 0.0)  # without random tokens none is seen
            assert float(costs.min()) > -1e-9
            total += float((chance[token] * costs * weights).sum())
    entropy = -float(torch.xlogy(chance, chance).sum())
    assert total == pytest.approx(entropy, abs=1e-5)


def test_a_certain_and_right_prediction_costs_nothing() -> None:
    logs = torch.full((3, 6), -torch.inf, dtype=torch.float64).scatter(-1, torch.tensor([[2]] * 3), 0.0)
    seen, times = torch.tensor([2, 5, 4]), torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    loss = mixed_nelbo(logs, seen, torch.tensor([2, 2, 2]), *levels(times, 0.2), 5)
    torch.testing.assert_close(loss, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    wrong = mixed_nelbo(logs, seen, torch.tensor([3, 3, 3]), *levels(times, 0.2), 5)
    assert float(wrong.min()) > 0.1


@pytest.mark.parametrize("scope", ["answer", "both"])
def test_the_likelihood_is_the_mean_over_noisy_texts(scope: str) -> None:
    """Times and noise drawn by hand, a float64 network given the time, and the sums over tokens written out."""
    model, prompt, answer, p = tiny("gidd_dit", p_uniform=0.2), [5, 9], [14, 3, 8], 0.2
    found = dl.log_likelihood(model, prompt, answer, samples=12, strata=6, seed=7, scope=scope)
    generator, losses, kinds, strength = torch.Generator().manual_seed(7), [], set(), 2 * p / (1 - p)
    first, text = 0 if scope == "both" else 2, [*prompt, *answer]
    for _ in range(2):
        times = [
            (1 - 2e-4) * (one + i) / 6 + 1e-4
            for i, one in enumerate(torch.rand(6, generator=generator, dtype=torch.float64).tolist())
        ]
        uniform = torch.rand(6, 5, generator=generator, dtype=torch.float64).tolist()
        random = torch.randint(SIZE - 1, (6, 5), generator=generator).tolist()  # [MASK] is the last id
        for row, t in enumerate(times):
            c = strength * math.sqrt(t * (1 - t))
            slope = strength * (1 - 2 * t) / (2 * math.sqrt(t * (1 - t)))
            alpha, masked, each = (1 - t) / (1 + c), t / (1 + c), c / (1 + c) / (SIZE - 1)
            ids = list(text)
            for place in range(first, 5):
                if uniform[row][place] >= alpha:
                    ids[place] = MASK if uniform[row][place] < alpha + masked else random[row][place]
            logits = dit64(model, torch.tensor([ids]), sigma=t)["logits"][0]
            logits[:, MASK] = -torch.inf
            likely = logits.softmax(-1).tolist()
            total = 0.0
            for place in range(first, 5):
                own, seen = text[place], ids[place]
                noise = [masked if j == MASK else each for j in range(SIZE)]
                q = [alpha * (j == own) + noise[j] for j in range(SIZE)]
                guess = [alpha * likely[place][j] + noise[j] for j in range(SIZE)]
                divergence = sum(q[j] * math.log(q[j] / guess[j]) for j in range(SIZE))
                ratio = q[seen] / guess[seen]
                if seen == MASK:
                    kinds.add("mask")
                    weight = 1 / (t * (1 - t))
                elif seen == own:
                    kinds.add("text")
                    weight = (c + (1 - t) * slope) / (SIZE - 1) / ((1 - t) * (1 - t + c / (SIZE - 1)))
                else:
                    kinds.add("random")
                    weight = (c + (1 - t) * slope) / ((1 - t) * c)
                total += weight * (divergence + ratio - math.log(ratio) - 1)
            losses.append(total)
    assert kinds == {"mask", "text", "random"}
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-3)
    assert found.value.item() == pytest.approx(-sum(losses) / 12, rel=1e-3)
    assert found.method == "mc"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"eps": 0.0}, "eps is 0.0; it must be between 0 and 0.5"),
        ({"scope": "prompt"}, "scope is 'prompt'; it must be 'answer' or 'both'"),
        ({"cfg_scale": 1.0}, "cfg_scale is 1.0, and the mc likelihood of gidd_dit has no guidance; leave it out"),
        ({"stratified": False}, "the mc likelihood of gidd_dit has no setting 'stratified'; it has eps, scope"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.log_likelihood(tiny("gidd_dit"), [5], [6, 7], samples=4, **given)


def test_the_corruption_draws_the_shares_of_a_time() -> None:
    from dlm_lens.sampling.likelihood.answer_pairs import Pair

    config = tiny("gidd_dit", p_uniform=0.3).config
    pair = Pair(torch.tensor([1]), torch.full((3000,), 7))
    texts = drawn_texts(HybridCorruption(), pair, config, 4, torch.Generator().manual_seed(3))
    assert texts.tokens[:, 0].tolist() == [1] * 4
    for row, (time, quarter) in enumerate(zip(texts.level.tolist(), range(4), strict=True)):
        assert quarter / 4 <= (time - 1e-4) / (1 - 2e-4) <= (quarter + 1) / 4
        alpha, masked, random = (float(one) for one in hybrid_shares(torch.tensor(time), 0.3))
        found, others = texts.tokens[row, 1:], SIZE - 1
        # A share of 3000 draws has a standard deviation of at most 0.0092.
        assert float((found == MASK).double().mean()) == pytest.approx(masked, abs=0.037)
        assert float((found == 7).double().mean()) == pytest.approx(alpha + random / others, abs=0.037)
