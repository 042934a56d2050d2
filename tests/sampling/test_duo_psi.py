"""Psi-samplers by default: the shares of the posterior, draws in float64, marginals, rows, refusals."""

import math
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.sampling.samplers.duo_psi import PsiSettings
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.test_duo import SIZE, bayes

PROMPTS: list[list[int]] = [[], [1, 2, 3]]
LOOP: dict[str, Any] = {
    "steps": 10, "gen_length": 10, "high_frac": 0.4, "middle_frac": 0.4, "middle_mode": "constant-remdm-0.06",
    "time_profile": "linear-constant-linear-0.9-inv",
}  # fmt: skip
CORRECTOR: dict[str, Any] = {"steps": 8, "gen_length": 10, **dict.fromkeys(("high_mode", "low_mode"), "pure-pc")}
CAPPED: dict[str, Any] = {
    "steps": 8,
    "gen_length": 10,
    "high_mode": "max-capped-0.4",
    "low_mode": "max-rescale-0.7",
}


def share_of(mode: str, alpha_t: float, alpha_s: float) -> float:
    """Kappa of a step by a rule, in words of the paper's ReMDM schedules."""
    name, _, eta = mode.rpartition("-")
    if mode in ("pure-posterior", "pure-pc"):
        return float(mode == "pure-posterior")
    rate = float(eta)
    if name == "constant":
        return rate
    if name != "constant-remdm":
        rate = min(rate, (1 - alpha_s) / alpha_t)
    if name == "max-rescale":
        rate *= float(eta)
    return min(1.0, max(0.0, 1 - rate / (1 - alpha_s)))


def by_hand(settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The times and the shares of the posterior."""
    values = vars(PsiSettings(**settings))
    total = values["steps"] + 1
    high, middle = round(values["high_frac"] * total), round(values["middle_frac"] * total)
    low = total - high - middle
    if values["time_profile"] == "linear":
        times = [1 + (1e-5 - 1) * i / (total - 1) for i in range(total)]
    else:
        fixed = 0.1
        times = [1 + (fixed - 1) * i / (high - 1) for i in range(high)] + [fixed] * middle
        times += [fixed + (1e-5 - fixed) * i / (low - 1) for i in range(low)]
    shares = []
    parts = [("high_mode", 0, high), ("middle_mode", high, middle), ("low_mode", high + middle, low)]
    for mode, first, count in ((values[name], first, count) for name, first, count in parts):
        for i in range(first, first + count):
            if i == first + count - 1 and ("max" in mode or "remdm" in mode):
                shares.append(1.0)  # the last of a part has no next time in it
            else:
                following = times[min(i + 1, total - 1)]
                shares.append(share_of(mode, 1 - 0.999 * times[i], 1 - 0.999 * following))
    return times, shares


@pytest.mark.parametrize("settings", [LOOP, CORRECTOR, CAPPED, {**LOOP, "middle_mode": "constant-0.3"}])
def test_times_and_shares(settings: dict[str, Any]) -> None:
    found, (times, shares) = PsiSettings(**settings), by_hand(settings)
    assert found.times(torch.float64).tolist() == pytest.approx(times, rel=1e-9)
    assert found.kappas(torch.float64).tolist() == pytest.approx(shares, rel=1e-9)
    assert len(set(found.kappas(torch.float64).tolist())) > 1


@pytest.mark.parametrize("settings", [LOOP, CORRECTOR, CAPPED])
def test_every_draw_and_confidence_is_that_of_a_float64_network(settings: dict[str, Any]) -> None:
    model, start = tiny("duo", sampler="duo_psi"), 3
    run = dl.denoise(model, PROMPTS[1], seed=4, **settings)
    (times, shares), steps = by_hand(settings), settings["steps"]
    generator = torch.Generator().manual_seed(4)
    canvas = torch.cat([torch.tensor(PROMPTS[1]), torch.randint(SIZE, (10,), generator=generator)])
    alphas = [1 - 0.999 * time for time in times]
    mixed = 0
    for step in range(steps + 1):
        assert run.canvases[step, 0].equal(canvas)
        alpha_t, alpha_s = alphas[step], alphas[step + 1] if step < steps else 1.0
        kappa = shares[step] if step < steps else 1.0
        logits = dit64(model, canvas[None], sigma=-math.log(alpha_t))["logits"][0, start:]
        likely, seen = logits.softmax(-1), canvas[start:]
        one, text = bayes(likely, seen, alpha_t, alpha_s), alpha_s * bayes(likely, seen, alpha_t, 1.0)
        weights = kappa * one + (1 - kappa) * (text + (1 - alpha_s) / SIZE)
        torch.testing.assert_close(weights.sum(-1), torch.ones(10, dtype=torch.float64))
        uniform = torch.rand(10, SIZE, generator=generator, dtype=torch.float64)
        drawn = (weights / -uniform.log()).argmax(-1)
        own = alpha_s * likely / (alpha_s * likely + (1 - alpha_s) / SIZE)
        certain = ((kappa * one * own + (1 - kappa) * text) / weights)[torch.arange(10), drawn]
        torch.testing.assert_close(run.confidence[step, 0, start:].double(), certain, atol=1e-4, rtol=1e-4)
        assert run.open[step + 1, 0, start:].equal(certain < 0.5)
        canvas = torch.cat([canvas[:start], drawn])
        mixed += 0 < kappa < 1
    assert run.tokens[0].equal(canvas)
    assert mixed or settings is CORRECTOR


@pytest.mark.parametrize("settings", [LOOP, CORRECTOR, CAPPED])
def test_with_a_perfect_network_the_marginals_are_those_of_the_noise(settings: dict[str, Any]) -> None:
    """Both parts have them, so that any mixture does: a share alpha_s + (1 - alpha_s) / V is the text's."""
    model, rows, length = tiny("duo", sampler="duo_psi"), 8, 120
    text = torch.randint(SIZE, (rows, length), generator=torch.Generator().manual_seed(0))
    certain = torch.full((rows, length, SIZE), -1e4).scatter(-1, text[..., None], 0.0)
    run = dl.denoise(
        model, [[]] * rows, seed=list(range(100, 100 + rows)), on_logits=lambda step, canvas, logits: certain,
        **{**settings, "gen_length": length},
    )  # fmt: skip
    total = rows * length
    for step, time in enumerate(by_hand(settings)[0]):
        alpha = 1 - 0.999 * time
        share = alpha + (1 - alpha) / SIZE
        kept = float((run.canvases[step] == text).sum())
        assert kept == pytest.approx(total * share, abs=4 * (total * share * (1 - share)) ** 0.5 + 1e-6), step
    assert run.tokens.equal(text)
    changed = (run.canvases[1:] != run.canvases[:-1]) & (run.canvases[:-1] == text)
    assert changed.any()  # tokens of the text became noise again


def test_a_row_is_what_it_is_alone_and_pure_posteriors_are_duos() -> None:
    model = tiny("duo", sampler="duo_psi")
    together = dl.denoise(model, PROMPTS, seed=[4, 5], **LOOP)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], seed=4 + row, **LOOP)
        assert together.canvases[:, row, together.attention_mask[row]].equal(alone.canvases[:, 0])
    plain = dl.denoise(model, PROMPTS, gen_length=8, steps=6)
    assert plain.settings["sampler"] == "duo_psi"
    assert plain.canvases.equal(dl.denoise(tiny("duo"), PROMPTS, gen_length=8, steps=6).canvases)
    again = dl.received_over_steps(model, together)
    recorded = dl.received_of(dl.record(model, PROMPTS, [dl.ReceivedAttention()], seed=[4, 5], **LOOP))
    torch.testing.assert_close(again.values, recorded.values, equal_nan=True)
    with pytest.raises(ValueError, match="has no setting 'high_mode'"):
        dl.denoise(tiny("duo"), PROMPTS, high_mode="pure-pc")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"high_mode": "pure"}, "high_mode is 'pure'; it must be one of pure-posterior"),
        ({"middle_mode": "constant-1.5"}, "middle_mode is 'constant-1.5'"),
        ({"low_mode": "max-capped-"}, "low_mode is 'max-capped-'"),
        ({"high_frac": 0.8, "middle_frac": 0.3}, "high_frac is 0.8 and middle_frac 0.3"),
        ({"high_frac": -0.1}, "high_frac is -0.1"),
        ({"time_profile": "cosine"}, "time_profile is 'cosine'; it must be one of linear"),
        ({"time_profile": "linear-constant-linear-1.0"}, "time_profile is 'linear-constant-linear-1.0'"),
        ({"noise_removal": "no"}, "noise_removal is 'no'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("duo", sampler="duo_psi"), [5, 6], gen_length=4, **settings)
