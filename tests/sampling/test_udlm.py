"""UDLM's sampler: the original's trajectories and losses, and by default Duo's step in exact numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.sampling.likelihood.nelbo import nelbo
from dlm_lens.sampling.samplers.duo import DuoSettings, levels_of
from dlm_lens.sampling.samplers.udlm import reference_levels, reference_posterior
from dlm_lens.sampling.samplers.uniform_posterior import Levels, posterior
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded
from tests.sampling.test_duo import bayes

GOLDEN = Path(__file__).parent.parent / "golden" / "udlm"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]
LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]
PROMPTS: list[list[int]] = [[], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 8}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    prompts = torch.zeros(setting["batch"], 0, dtype=torch.long)
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    given = {"gen_length": 12, "seed": setting["seed"], **setting["args"]}
    found = dl.denoise(model, prompts, reference_quirks=True, **given)
    handle.remove()
    assert found.canvases.equal(load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"])
    assert len(passes) == found.steps == setting["forwards"]
    assert found.tokens.tolist() == setting["final"]
    changed = (found.canvases[1:] != found.canvases[:-1]).sum(-1)
    assert changed.tolist() == setting["changed_per_step"]
    assert int(changed.sum()) > 12
    # The quirks are the stream of the batch, and draws in float32.
    plain = dl.denoise(model, prompts, **given)
    assert plain.canvases[0].equal(found.canvases[0]) == (setting["batch"] == 1)
    assert not plain.canvases[1].equal(found.canvases[1])


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_the_schedule_in_float32_is_duos(eps: float) -> None:
    settings = DuoSettings(steps=7, gen_length=4, noise_removal="none", eps=eps)
    for step in range(7):
        found, exact = reference_levels(settings, step), levels_of(settings, step)
        assert found.alpha_t.dtype == torch.float32
        # alpha of 1e-3 is 1 less a number in float32, so that half of 1.2e-7 is 6e-5 of it
        for name in ("sigma", "alpha_t", "alpha_s"):
            assert float(getattr(found, name)) == pytest.approx(float(getattr(exact, name)), rel=2e-4), name


def test_the_numbers_of_the_posterior_are_the_originals() -> None:
    """To the bit, of sums, products and quotients alone: random numbers are equal often enough for it to count."""
    stored = load_file(GOLDEN / "sampling.safetensors")
    x, seen, q = (stored[f"posterior.{name}"] for name in ("x", "xt", "q"))
    for row in range(len(x)):
        levels = Levels(0.0, stored["posterior.alpha_t"][row], stored["posterior.alpha_s"][row])
        found = reference_posterior(x[row], seen[row], levels)
        assert found.dtype == torch.float32
        assert found.equal(q[row])
        exact = posterior(x[row].double(), seen[row], levels)
        assert not (exact / exact.sum(-1, keepdim=True)).float().equal(q[row])


def test_the_posterior_of_the_original_is_bayes_rule() -> None:
    generator = torch.Generator().manual_seed(1)
    likely = (3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).softmax(-1)
    seen = torch.tensor([0, 3, 8, 8, 2, 2])
    levels = levels_of(DuoSettings(steps=5, gen_length=4), 2)
    found = reference_posterior(likely, seen, levels)
    expected = bayes(likely, seen, float(levels.alpha_t), float(levels.alpha_s))
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-10)
    weights = posterior(likely, seen, levels)
    torch.testing.assert_close(found, weights / weights.sum(-1, keepdim=True), atol=1e-14, rtol=1e-10)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_p": 0.8}, {"noise_removal": "greedy"}])
def test_a_run_is_duos_of_the_same_weights(more: dict[str, Any]) -> None:
    """Whose default is one more step, the removal of noise."""
    model, duo = tiny("udlm"), tiny("duo")
    duo.load_state_dict(model.state_dict())
    seeds = {"seed": [4, 5, 6]}
    run = dl.denoise(model, PROMPTS, **RUN, **seeds, **more)
    other = dl.denoise(duo, PROMPTS, **{**RUN, **seeds, "noise_removal": "none", **more})
    assert run.steps == 8 + ("noise_removal" in more)
    assert run.canvases.equal(other.canvases)
    assert run.confidence.equal(other.confidence)
    assert (run.canvases[1:] != run.canvases[:-1]).any()
    alone = dl.denoise(model, PROMPTS[1:2], **RUN, seed=5, **more)
    kept = run.attention_mask[1]
    assert run.canvases[:, 1, kept].equal(alone.canvases[:, 0])


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: str(entry["seed"]))
@torch.no_grad()
def test_the_authors_loss_is_the_bound_at_an_alpha_of_1_less_t(entry: dict[str, Any]) -> None:
    """Their noise has alpha = 1 - (1 - 1e-3) t and their loss 1 - t, with alpha' = -1 in place of -(1 - 1e-3)."""
    model: Any = loaded(GOLDEN)
    clean, noisy = torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    expected = torch.tensor(entry["loss_per_token_float64"], dtype=torch.float64)
    for row, time in enumerate(entry["t"]):
        t = torch.tensor([time], dtype=torch.float32)
        sigma = -torch.log1p(-(1 - 1e-3) * t)
        logs = model(input_ids=noisy[row : row + 1], sigma=sigma).logits[0].double().log_softmax(-1)
        alpha = torch.full((12,), 1 - time, dtype=torch.float64)
        found = nelbo(logs, noisy[row], clean[row], alpha) / (1 - 1e-3)
        torch.testing.assert_close(found, expected[row], atol=1e-4, rtol=1e-4)
    assert float(expected.max()) > 1


def test_likelihoods() -> None:
    model = tiny("udlm")
    found = dl.log_likelihood(model, ["w1 w2", "w3"], ["w3 w4", "w5 w6 w7"], samples=8)
    assert found.method == "mc"
    assert bool((found.value < 0).all())
    with pytest.raises(ValueError, match=r"hides tokens with \[MASK\]"):
        dl.log_likelihood(model, "w3", "w4", method="chain_rule")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_removal": True}, "noise_removal is True; it must be one of ancestral, greedy, none"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
        ({"use_float64": True}, "has no setting 'use_float64'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("udlm"), [5, 6], **{"gen_length": 4, "steps": 2} | settings)
