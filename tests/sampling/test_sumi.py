"""Sumi's samplers by default: draws in float64, the delimiter and the context after it, rows, likelihoods."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling.likelihood.nelbo import nelbo
from dlm_lens.sampling.samplers.sumi import SumiSettings
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.checkpoints import loaded
from tests.sampling.interrupted import resumed_recording
from tests.sampling.test_duo import bayes

GOLDEN = Path(__file__).parent.parent / "golden" / "sumi"
LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]
PROMPTS: list[list[int]] = [[5, 6], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 6, "canvas_length": 17, "seed": 4}
SIZE, EOS, BOS = 64, 62, 60
FREE = [i for i in range(17) if i not in (10, 11)]
"""Positions after the prompt that are denoised: the answer, and five of context after the delimiter."""


def alpha_at(step: int, steps: int, schedule: str = "linear", low: float = -9.0, high: float = 9.0) -> float:
    """The share of the text's tokens: from the schedule, with its log-SNR between the bounds."""
    part = step / steps
    if schedule == "linear":
        share = 1e-4 + part * (1 - 2e-4)
    else:
        share = (1 + math.cos(math.pi * (1 - 1e-3 + part * (2e-3 - 1)))) / 2
    share = min(max(share, 1e-6), 1 - 1e-6)
    bounded = min(max(math.log(share / (1 - share)), low), high)
    return 1 / (1 + math.exp(-bounded))


def quantiles(likely: Tensor, generator: torch.Generator) -> Tensor:
    """Of every row the token whose interval of [0, 1) holds the row's next random number."""
    found = []
    for row in likely.tolist():
        left, token = float(torch.rand(1, generator=generator, dtype=torch.float64)) * sum(row), 0
        while left >= row[token]:
            left, token = left - row[token], token + 1
        found.append(token)
    return torch.tensor(found)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("bounds", [(-9.0, 9.0), (-3.0, 2.0)])
def test_the_schedule(schedule: str, bounds: tuple[float, float]) -> None:
    settings = SumiSettings(steps=7, gen_length=3, schedule=schedule, min_log_snr=bounds[0], max_log_snr=bounds[1])
    expected = [alpha_at(step, 7, schedule, *bounds) for step in range(8)]
    assert settings.alphas(torch.float64).tolist() == pytest.approx(expected, rel=1e-9)
    assert settings.alphas(torch.float32).tolist() == pytest.approx(expected, rel=2e-4)
    assert expected == sorted(expected)


@pytest.mark.parametrize("settings", [{}, {"schedule": "cosine", "temperature": 0.7}, {"max_log_snr": 2.0}])
def test_every_draw_and_confidence_is_that_of_a_float64_network(settings: dict[str, Any]) -> None:
    """One draw at every denoised position, with the numbers of the row's generator; the delimiter stays."""
    model, start = tiny("sumi"), 3
    run = dl.denoise(model, PROMPTS[1], **RUN, **settings)
    assert run.steps == 6
    generator = torch.Generator().manual_seed(4)
    free = torch.tensor([start + i for i in FREE])
    canvas = torch.cat([torch.tensor(PROMPTS[1]), torch.randint(SIZE, (17,), generator=generator)])
    canvas[start + 10], canvas[start + 11] = EOS, BOS
    opened = torch.zeros(20, dtype=torch.bool)
    opened[free] = True
    bounds = (-9.0, settings.get("max_log_snr", 9.0))
    for step in range(6):
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        alpha_t, alpha_s = (
            alpha_at(one, 6, settings.get("schedule", "linear"), *bounds) for one in (step, step + 1)
        )
        logits = forward64(model, canvas[None])["logits"][0, free]
        likely = (logits / settings.get("temperature", 1.0)).softmax(-1)
        drawn = quantiles(bayes(likely, canvas[free], alpha_t, alpha_s), generator)
        text = alpha_s * likely[torch.arange(len(free)), drawn]
        certain = text / (text + (1 - alpha_s) / SIZE)
        torch.testing.assert_close(run.confidence[step, 0, free].double(), certain, atol=1e-4, rtol=1e-4)
        before, canvas = canvas, canvas.clone()
        canvas[free] = drawn
        now = torch.zeros(20, dtype=torch.bool)
        now[free] = certain < 0.5
        assert run.unmasked[step, 0].equal(opened & ~now)
        decided = torch.zeros(20, dtype=torch.bool)
        decided[free] = ~opened[free]
        assert run.revised[step, 0].equal(decided & (now | (canvas != before)))
        opened = now
    assert run.tokens[0].equal(canvas)
    answer = canvas[start : start + 10].tolist()
    answer = answer[: answer.index(EOS)] if EOS in answer else answer
    assert run.answers == [model.tokenizer.decode(answer, skip_special_tokens=True)]


@pytest.mark.parametrize("remasking", ["ancestral", "adaptive"])
def test_the_frequencies_of_one_step(remasking: str) -> None:
    """One step of 4000 positions that see the same token and the same logits, against the weights of the draw."""
    model, positions = tiny("sumi", max_position_embeddings=512), 500
    logits = 2 * torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    run = dl.denoise(
        model, [[1]] * 8, gen_length=positions, canvas_length=positions, delimiter=False, steps=2,
        remasking=remasking, tokens_per_step=positions, seed=list(range(8)),
        on_canvas=lambda step, canvas: torch.full_like(canvas, 7) if step == 1 else None,
        on_logits=lambda step, canvas, found: logits.expand(found.shape),
    )  # fmt: skip
    likely = logits.double().softmax(-1)
    if remasking == "ancestral":
        likely = bayes(likely[None], torch.tensor([7]), alpha_at(1, 2), alpha_at(2, 2))[0]
    counts = torch.bincount(run.tokens[:, 1:].flatten(), minlength=SIZE).double()
    often = likely * 4000 >= 5
    rest = torch.stack([counts[~often].sum(), likely[~often].sum() * 4000])
    statistic = ((counts - 4000 * likely) ** 2 / (4000 * likely))[often].sum() + (rest[0] - rest[1]) ** 2 / rest[1]
    freedom = int(often.sum())
    assert freedom > 10
    assert float(statistic) < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("settings", [{"tokens_per_step": 3}, {"temperature": 0.0}, {"remasking": "greedy"}])
def test_adaptive_steps_write_what_the_network_would_change_most(settings: dict[str, Any]) -> None:
    model, start = tiny("sumi"), 3
    run = dl.denoise(model, PROMPTS[1], **RUN | {"steps": 9}, **{"remasking": "adaptive"} | settings)
    generator = torch.Generator().manual_seed(4)
    free = torch.tensor([start + i for i in FREE])
    canvas = torch.cat([torch.tensor(PROMPTS[1]), torch.randint(SIZE, (17,), generator=generator)])
    canvas[start + 10], canvas[start + 11] = EOS, BOS
    opened = torch.zeros(20, dtype=torch.bool)
    opened[free] = True
    greedy, number = settings.get("remasking") == "greedy", settings.get("tokens_per_step", 1)
    for step in range(9):
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        likely = forward64(model, canvas[None])["logits"][0, free].softmax(-1)
        wanted = likely.amax(-1) - likely[torch.arange(len(free)), canvas[free]]
        torch.testing.assert_close(run.confidence[step, 0, free].double(), wanted, atol=1e-4, rtol=1e-4)
        best = likely.argmax(-1)
        if not greedy and settings.get("temperature", 1.0):
            best = quantiles(likely, generator)
        chosen = torch.ones(len(free), dtype=torch.bool)
        if not greedy:
            chosen = torch.zeros(len(free), dtype=torch.bool)
            chosen[wanted.argsort(descending=True)[:number]] = True
        before, canvas = canvas, canvas.clone()
        canvas[free[chosen]] = best[chosen]
        written = torch.zeros(20, dtype=torch.bool)
        written[free[chosen]] = True
        assert run.unmasked[step, 0].equal(opened & written)
        assert run.revised[step, 0].equal(~opened & written & (canvas != before))
        opened = opened & ~written
    assert run.tokens[0].equal(canvas)


@pytest.mark.parametrize("remasking", ["ancestral", "adaptive", "greedy"])
def test_a_row_is_what_it_is_alone(remasking: str) -> None:
    model = tiny("sumi")
    together = dl.denoise(model, PROMPTS, remasking=remasking, **RUN | {"seed": [4, 5, 6]})
    assert (together.canvases[:-1] != together.canvases[1:]).any()
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], remasking=remasking, **RUN | {"seed": 4 + row})
        kept = together.attention_mask[row]
        assert int(kept.sum()) == len(prompt) + 17
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])
        assert together.open[:, row, kept].equal(alone.open[:, 0])
        assert alone.tokens[0, : len(prompt)].tolist() == prompt
        assert alone.tokens[0, len(prompt) + 10 : len(prompt) + 12].tolist() == [EOS, BOS]


def test_without_delimiter_and_context_the_canvas_is_the_answer() -> None:
    model = tiny("sumi")
    run = dl.denoise(model, PROMPTS[1], gen_length=7, steps=2, canvas_length=None, delimiter=False)
    assert run.tokens.shape == (1, 32 + 3)  # tiny's default, which None does not change
    bare = dl.denoise(model, PROMPTS[1], gen_length=7, steps=2, canvas_length=7, delimiter=False)
    assert bare.tokens.shape == (1, 10)
    assert bool(bare.open[0, 0, 3:].all())
    longer = dl.denoise(model, PROMPTS[1], gen_length=40, steps=2)
    assert longer.tokens.shape == (1, 3 + 42)
    assert dl.denoise(model, "w1", gen_length=4).steps == 4


def test_hidden_columns_traces_recordings_and_resuming(tmp_path: Path) -> None:
    model: Any = tiny("sumi")
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[1:2], hooks=[mask_positions(1)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    visible = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    visible[..., 1] = False
    for step in range(run.steps):
        expected = forward64(model, run.canvases[step], visible=visible)["logits"]
        torch.testing.assert_close(seen[step].double(), expected, atol=2e-5, rtol=2e-4)
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    whole = dl.record(model, PROMPTS, reducers, **RUN)
    sums = dl.received_of(whole).column_sums[3, 1, 1, :, :].double()
    pattern = forward64(model, whole.run.canvases[3, 1:2])["pattern1"][0]
    torch.testing.assert_close(sums, pattern.sum(-2), atol=2e-5, rtol=2e-4)
    assert float(pattern.sum(-1).max()) < 1
    again = dl.received_over_steps(model, whole.run)
    torch.testing.assert_close(again.values, dl.received_of(whole).values, equal_nan=True)
    resumed = resumed_recording(model, tmp_path / "rec", 4, PROMPTS, reducers, **RUN)
    for name in ("canvases", "open", "unmasked", "revised", "proposals"):
        assert getattr(resumed.run, name).equal(getattr(whole.run, name)), name
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[2]:
            traced = lm.layers[0].attn.pattern.save()
        found = tracer.result.save()
    assert found.canvases.equal(whole.run.canvases)
    expected = forward64(model, whole.run.canvases[2, 1:2])["pattern0"]
    torch.testing.assert_close(traced[1:2].double(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: str(entry["seed"]))
@torch.no_grad()
def test_the_authors_loss_is_the_integrand_of_the_bound_in_the_log_snr(entry: dict[str, Any]) -> None:
    """Their w (KL + IS) is alpha (1 - alpha) times the integrand in alpha, which `log_likelihood` averages."""
    model: Any = loaded(GOLDEN)
    noisy, clean = torch.tensor(entry["xt"]), torch.tensor(entry["x0"])
    logs = model(input_ids=noisy).logits.double().log_softmax(-1)
    expected = torch.tensor(entry["loss_per_token_float64"], dtype=torch.float64)
    for row, time in enumerate(entry["t"]):
        alpha = torch.full((10,), 1 - time, dtype=torch.float64)
        found = nelbo(logs[row], noisy[row], clean[row], alpha) / (1 - 1e-3)  # of alpha' = -(1 - 1e-3)
        torch.testing.assert_close(found * alpha * (1 - alpha), expected[row], atol=1e-4, rtol=1e-4)
    assert float(expected.max()) > 1


def test_likelihoods() -> None:
    model = tiny("sumi")
    found = dl.log_likelihood(model, ["w1 w2", "w3"], ["w3 w4", "w5 w6 w7"], samples=8)
    assert found.method == "mc"
    assert bool((found.value < 0).all())
    alone = dl.log_likelihood(model, "w3", "w5 w6 w7", samples=8)
    assert float(alone) == pytest.approx(float(found.value[1]), rel=1e-5)
    with pytest.raises(ValueError, match=r"hides tokens with \[MASK\]"):
        dl.log_likelihood(model, "w3", "w4", method="chain_rule")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"remasking": "origin"}, "remasking 'origin' is none of Sumi's: ancestral, adaptive, greedy"),
        ({"schedule": "quadratic"}, "schedule is 'quadratic'; it must be one of linear, cosine"),
        ({"min_log_snr": 9.0}, r"min_log_snr is 9.0 and max_log_snr 9.0; the first must be the less"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; it must be at least 1"),
        ({"canvas_length": 5}, "canvas_length is 5; it must hold 4 tokens of the answer and 2 of the delimiter"),
        ({"canvas_length": 6, "reference_quirks": True}, "counts the 2 positions of the prompt; give at least 8"),
        ({"gen_length": 0}, "gen_length is 0; it must be at least 1"),
        ({"num_denoising_steps": 3}, "num_denoising_steps is steps here"),
        ({"anchor_eosbos": False}, "anchor_eosbos is delimiter here"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("sumi"), [5, 6], **{"gen_length": 4, "steps": 2} | settings)


def test_a_delimiter_needs_its_ids() -> None:
    with pytest.raises(
        ValueError, match="eos_token_id 62 and bos_token_id None; set them, or give delimiter=False"
    ):
        dl.denoise(tiny("sumi", bos_token_id=None), "w1", gen_length=4)
