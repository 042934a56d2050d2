"""The likelihood of GIDD: the limit of short steps, MDLM's, and texts drawn by hand after a clean prompt."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.nelbo import mixed_nelbo
from dlm_lens.sampling.likelihood.noisy_texts import drawn_texts
from dlm_lens.sampling.samplers.gidd import GiddCorruption
from dlm_lens.sampling.samplers.mixed_noise import Mixture
from dlm_lens.testing import tiny
from tests.gidd64 import network64
from tests.sampling.test_gidd import NOISES
from tests.sampling.test_mixed_noise import mixed_bayes_of

SIZE, MASK = 9, 6


class Config:
    """A config of GIDD, as far as its noise needs it."""

    vocab_size, mask_token_id = SIZE, MASK

    def __init__(self, noise_type: float) -> None:
        self.noise_type = noise_type


def shares(config: Any, time: float) -> tuple[float, float, float]:
    """Of the text, of masks and of random tokens at t: alpha = 1 - t."""
    bounded = min(max(math.log((1 - time) / time) + config.noise_type, -700.0), 700.0)
    random = 1 / (1 + math.exp(-bounded))
    return 1 - time, time * (1 - random), time * random


def prediction() -> Tensor:
    """Ln x_theta of one position, without [MASK]."""
    logits = 2 * torch.randn(1, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[:, MASK] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("noise_type", [0.7, -0.5, 1000.0])
@pytest.mark.parametrize("time", [0.2, 0.6, 0.9])
def test_the_integrand_is_the_limit_of_the_divergence_of_a_short_step(noise_type: float, time: float) -> None:
    """E_z KL(q(x_s | z, x) || q(x_s | z, x_theta)) / (t - s), from full transition matrices, for s near t."""
    config, logs, text, step = Config(noise_type), prediction(), 2, 1e-6
    now, then = shares(config, time), shares(config, time - step)
    chances = torch.full((SIZE,), now[2] / (SIZE - 1), dtype=torch.float64)
    chances[MASK] = now[1]
    chances[text] += now[0]
    seen = torch.arange(SIZE)
    right = mixed_bayes_of(torch.eye(SIZE, dtype=torch.float64)[[text] * SIZE], seen, now, then, MASK)
    model = mixed_bayes_of(logs.exp().expand(SIZE, -1), seen, now, then, MASK)
    divergence = torch.xlogy(right, right / model).nan_to_num(0.0).sum(-1)
    expected = (chances * divergence)[chances > 0].sum() / step
    times = torch.full((SIZE,), time, dtype=torch.float64)
    levels, slopes = GiddCorruption().levels(config, times)
    found = mixed_nelbo(logs.expand(SIZE, -1), seen, torch.full((SIZE,), text), levels, slopes, MASK)
    # The step has an error of its own length, and matrices of 1e-16 / step.
    assert float((chances * found)[chances > 0].sum()) == pytest.approx(float(expected), rel=2e-4)


@pytest.mark.parametrize("noise_type", [0.7, -0.5, 1000.0, -1000.0])
def test_levels_and_slopes(noise_type: float) -> None:
    config, times = Config(noise_type), torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    levels, slopes = GiddCorruption().levels(config, times)
    for place, time in enumerate(times.tolist()):
        assert [float(one[place]) for one in levels] == pytest.approx(shares(config, time), abs=1e-12)
        after, before = shares(config, time + 1e-6), shares(config, time - 1e-6)
        numeric = [(b - a) / 2e-6 for a, b in zip(before, after, strict=True)]
        assert [float(one[place]) for one in slopes] == pytest.approx(numeric, abs=1e-6)


def test_of_masks_alone_it_is_mdlms() -> None:
    """-ln x_theta of the text / t at masks, and nothing at tokens."""
    config, times = Config(-1000.0), torch.tensor([0.3, 0.3], dtype=torch.float64)
    levels, slopes = GiddCorruption().levels(config, times)
    logs = prediction().expand(2, -1)
    found = mixed_nelbo(logs, torch.tensor([MASK, 2]), torch.tensor([2, 2]), levels, slopes, MASK)
    assert found.tolist() == pytest.approx([-float(logs[0, 2]) / 0.3, 0.0])


def test_a_certain_and_right_prediction_costs_nothing() -> None:
    levels, slopes = GiddCorruption().levels(Config(0.7), torch.full((3,), 0.4, dtype=torch.float64))
    logs = torch.full((3, SIZE), -torch.inf, dtype=torch.float64)
    logs[:, 2] = 0.0
    found = mixed_nelbo(logs, torch.tensor([2, MASK, 5]), torch.tensor([2, 2, 2]), levels, slopes, MASK)
    torch.testing.assert_close(found, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    (wrong,) = mixed_nelbo(logs[:1].roll(1, -1), torch.tensor([2]), torch.tensor([2]), *(
        Mixture(*(one[:1] for one in part)) for part in (levels, slopes)
    ), MASK)  # fmt: skip
    assert float(wrong) > 0.5


@pytest.mark.parametrize("scope", ["answer", "both"])
@pytest.mark.parametrize("noise", NOISES)
def test_the_likelihood_is_the_mean_over_noisy_texts(noise: str, scope: str) -> None:
    """Texts drawn by hand with the item's numbers; the network in float64, the prompt without noise and clean."""
    model = tiny("gidd", **NOISES[noise])
    found = dl.log_likelihood(model, [[5, 6, 7]], [[11, 12]], samples=8, strata=4, seed=3, scope=scope)
    mask = 3 if noise == "uniform" else 63
    generator, tokens, total = torch.Generator().manual_seed(3), torch.tensor([5, 6, 7, 11, 12]), 0.0
    scored = torch.arange(5) >= (3 if scope == "answer" else 0)
    for _ in range(2):
        start = torch.rand(4, generator=generator, dtype=torch.float64)
        times = (1 - 2e-4) * (start + torch.arange(4)) / 4 + 1e-4
        drawn = torch.rand(4, 5, generator=generator, dtype=torch.float64)
        ids = torch.randint(63, (4, 5), generator=generator)
        for row, time in enumerate(times.tolist()):
            alpha, masked, random = shares(model.config, time)
            noise_ids = torch.where(drawn[row] < alpha + masked, mask, ids[row] + (ids[row] >= mask))
            canvas = torch.where((drawn[row] >= alpha) & scored, noise_ids, tokens)
            logits = network64(model, canvas, 3 if scope == "answer" else 0)["logits"]
            logits[:, mask] = -torch.inf
            levels, slopes = GiddCorruption().levels(model.config, torch.full((5,), time, dtype=torch.float64))
            assert [float(one[0]) for one in levels] == pytest.approx((alpha, masked, random), abs=1e-12)
            total += mixed_nelbo(logits.log_softmax(-1), canvas, tokens, levels, slopes, mask)[scored].sum() / 8
    # Logits in float32, and rates of up to 1e4 near t = 0.
    assert float(found.value[0]) == pytest.approx(-float(total), rel=2e-4)
    assert found.method == "mc"


def test_items_do_not_depend_on_their_batch_and_a_masked_model_has_a_chain_rule() -> None:
    model = tiny("gidd", **NOISES["masks"])
    prompts, answers = [[5, 6], [7]], [[8, 9, 10], [11]]
    drawn: dict[str, Any]
    for method, drawn in (("mc", {"samples": 8}), ("chain_rule", {})):
        both = dl.log_likelihood(model, prompts, answers, method, **drawn)
        for item in range(2):
            alone = dl.log_likelihood(model, [prompts[item]], [answers[item]], method, **drawn)
            assert float(both.value[item]) == pytest.approx(float(alone.value[0]), rel=1e-5)
    expected = 0.0
    for place in range(3):
        canvas = torch.tensor([5, 6, *answers[0][:place], *[63] * (3 - place)])
        logits = network64(model, canvas, 2)["logits"]
        logits[:, 63] = -torch.inf  # [MASK] has no probability
        expected += logits.log_softmax(-1)[2 + place, answers[0][place]]
    assert float(both.value[0]) == pytest.approx(float(expected), rel=1e-4)


def test_what_is_not_defined_is_refused() -> None:
    with pytest.raises(ValueError, match="the mc likelihood of gidd has no guidance"):
        dl.log_likelihood(tiny("gidd", **NOISES["masks"]), [[5]], [[6]], cfg_scale=1.0)
    with pytest.raises(ValueError, match="so that guidance cannot mask it"):
        dl.log_likelihood(tiny("gidd", **NOISES["masks"]), [[5]], [[6]], "chain_rule", cfg_scale=1.0)
    with pytest.raises(ValueError, match=r"hides tokens with \[MASK\]"):
        dl.log_likelihood(tiny("gidd"), [[5]], [[6]], "chain_rule")
    # The network is never shown it, and it has no probability: its loss would be NaN.
    with pytest.raises(ValueError, match="answer 0 holds the mask token 3"):
        dl.log_likelihood(tiny("gidd"), [[5]], [[6, 3, 7]])


def test_random_tokens_are_never_the_mask() -> None:
    corruption, config = GiddCorruption(), tiny("gidd").config
    pair = Pair(torch.tensor([5]), torch.arange(10, 60))
    texts = drawn_texts(corruption, pair, config, 64, torch.Generator().manual_seed(0))
    assert not bool((texts.tokens == 3).any())
    assert bool((texts.tokens[:, 0] == 5).all())
    changed = (texts.tokens[:, 1:] != pair.answer).double().mean(-1)
    torch.testing.assert_close(changed, texts.level * 62 / 63, atol=0.3, rtol=0)
    assert len(set(texts.level.tolist())) == 64
