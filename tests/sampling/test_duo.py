"""Duo's sampler by default: the posterior and its draws in float64, rows, noise levels; recordings and lenses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling.samplers.duo import DuoSettings, levels_of
from dlm_lens.sampling.samplers.uniform_posterior import Levels, posterior
from dlm_lens.sampling.stored_run import StoredRun
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.interrupted import resumed_recording

PROMPTS: list[list[int]] = [[], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 8, "seed": 4}
SIZE = 64


def alphas(step: int, steps: int, eps: float = 1e-5) -> tuple[float, float]:
    """Alpha at the two ends of a step: 1 - 0.999 t, t from 1 to eps; 1 at the end of the removal of noise."""
    ends = [1 - 0.999 * (1 - (1 - eps) * number / steps) for number in range(steps + 1)]
    return ends[step], ends[step + 1] if step < steps else 1.0


def sigma_at(step: int, steps: int = 8) -> float:
    """What the network is given at a step."""
    return -math.log(alphas(step, steps)[0])


def bayes(likely: Tensor, seen: Tensor, alpha_t: float, alpha_s: float) -> Tensor:
    """Q(x_s | x_t, x_theta) from the matrices of the noise process: no formula of the library."""
    size = likely.shape[-1]
    uniform = torch.full((size, size), 1 / size, dtype=torch.float64)
    eye = torch.eye(size, dtype=torch.float64)
    prior = likely @ (alpha_s * eye + (1 - alpha_s) * uniform)
    forwards = alpha_t / alpha_s * eye + (1 - alpha_t / alpha_s) * uniform
    joint = prior * forwards[:, seen].T
    return joint / joint.sum(-1, keepdim=True)


@pytest.mark.parametrize("ends", [(0.001, 0.1), (0.4, 0.45), (0.9, 0.99999), (0.99999, 1.0), (0.001, 1.0)])
def test_the_posterior_is_bayes_rule(ends: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    likely = (3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).softmax(-1)
    likely[4:] = torch.eye(9, dtype=torch.float64)[[2, 5]]  # a network that is certain, of x_t and of another token
    seen = torch.tensor([0, 3, 8, 8, 2, 2])
    alpha_t, alpha_s = (torch.tensor(end, dtype=torch.float64) for end in ends)
    weights = posterior(likely, seen, Levels(0.0, alpha_t, alpha_s))
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), bayes(likely, seen, *ends), atol=1e-14, rtol=1e-10
    )
    if ends[1] == 1.0:  # nothing but the text is left: no token that the network excludes
        assert weights[5].nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("reference_quirks", [False, True])
def test_the_schedule(reference_quirks: bool) -> None:
    settings = DuoSettings(steps=8, gen_length=10)
    for step in range(9):
        levels = levels_of(settings, step, reference_quirks=reference_quirks)
        expected = alphas(step, 8)
        assert [float(levels.alpha_t), float(levels.alpha_s)] == pytest.approx(expected, rel=1e-4)
        assert levels.sigma == pytest.approx(-math.log(expected[0]), rel=1e-4)
    assert float(levels.alpha_s) == 1.0
    assert levels.alpha_t.dtype == (torch.float32 if reference_quirks else torch.float64)


@pytest.mark.parametrize(
    "settings", [{}, {"noise_removal": "greedy"}, {"noise_removal": "none", "temperature": 0.7}, {"top_p": 0.5}]
)
def test_every_draw_and_confidence_is_that_of_a_float64_network(settings: dict[str, Any]) -> None:
    """One draw at every position of the answer, open or decided, with the numbers of the row's generator."""
    model, start = tiny("duo"), 3
    run = dl.denoise(model, PROMPTS[1], **RUN, **settings)
    removal = settings.get("noise_removal", "ancestral")
    assert run.steps == 8 + (removal != "none")
    generator = torch.Generator().manual_seed(4)
    canvas = torch.cat([torch.tensor(PROMPTS[1]), torch.randint(SIZE, (10,), generator=generator)])
    opened = torch.arange(13) >= start
    for step in range(run.steps):
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        alpha_t, alpha_s = alphas(step, 8)
        logits = dit64(model, canvas[None], sigma=sigma_at(step))["logits"][0, start:]
        likely = (logits / settings.get("temperature", 1.0)).softmax(-1)
        if "top_p" in settings:
            ranked, order = likely.sort(-1, descending=True)
            kept = ranked * (ranked.cumsum(-1) - ranked <= settings["top_p"])
            likely = torch.zeros_like(likely).scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        if step == 8 and removal == "greedy":
            drawn = likely.argmax(-1)
        else:
            uniform = torch.rand(10, SIZE, generator=generator, dtype=torch.float64)
            drawn = (bayes(likely, canvas[start:], alpha_t, alpha_s) / -uniform.log()).argmax(-1)
        text = alpha_s * likely[torch.arange(10), drawn]
        certain = text / (text + (1 - alpha_s) / SIZE)
        torch.testing.assert_close(run.confidence[step, 0, start:].double(), certain, atol=1e-4, rtol=1e-4)
        before, canvas = canvas, torch.cat([canvas[:start], drawn])
        now = torch.cat([torch.zeros(start, dtype=torch.bool), certain < 0.5])
        assert run.unmasked[step, 0].equal(opened & ~now)
        assert run.revised[step, 0].equal(~opened & (now | (canvas != before)))
        opened = now
    assert run.tokens[0].equal(canvas)
    if removal != "none":
        assert not run.open[-1].any()


def test_with_a_perfect_network_every_canvas_has_the_marginals_of_the_noise() -> None:
    """X_s given the text x: its own token with probability alpha_s + (1 - alpha_s) / V, all others alike."""
    model, rows, length, steps = tiny("duo"), 8, 120, 10
    text = torch.randint(SIZE, (rows, length), generator=torch.Generator().manual_seed(0))
    certain = torch.full((rows, length, SIZE), -1e4).scatter(-1, text[..., None], 0.0)
    run = dl.denoise(
        model, [[]] * rows, gen_length=length, steps=steps, seed=list(range(100, 100 + rows)),
        on_logits=lambda step, canvas, logits: certain,
    )  # fmt: skip
    total = rows * length
    for step in range(steps + 1):
        alpha = alphas(step, steps)[0]
        share = alpha + (1 - alpha) / SIZE
        kept = float((run.canvases[step] == text).sum())
        assert kept == pytest.approx(total * share, abs=4 * (total * share * (1 - share)) ** 0.5 + 1e-6), step
    other = run.canvases[3][run.canvases[3] != text]
    counts = torch.bincount(other, minlength=SIZE).double()
    # Pearson's statistic of uniform tokens: 63 degrees of freedom, mean 63 and standard deviation 11.2.
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 63 + 4 * 11.2
    assert run.tokens.equal(text)
    assert not run.open[-1].any()


def test_the_frequencies_of_one_step_are_the_posteriors() -> None:
    """One step of 4000 positions that see the same token and the same logits, against Bayes' rule."""
    model, positions = tiny("duo", max_position_embeddings=512), 500
    logits = 2 * torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    run = dl.denoise(
        model, [[]] * 8, gen_length=positions, steps=2, seed=list(range(8)), noise_removal="none",
        on_canvas=lambda step, canvas: torch.full_like(canvas, 7) if step == 1 else None,
        on_logits=lambda step, canvas, found: logits.expand(found.shape),
    )  # fmt: skip
    alpha_t, alpha_s = alphas(1, 2, 1e-5)
    expected = bayes(logits.double().softmax(-1)[None], torch.tensor([7]), alpha_t, alpha_s)[0]
    counts = torch.bincount(run.tokens.flatten(), minlength=SIZE).double()
    often = expected * 4000 >= 5
    rest = torch.stack([counts[~often].sum(), expected[~often].sum() * 4000])
    statistic = ((counts - 4000 * expected) ** 2 / (4000 * expected))[often].sum() + (
        rest[0] - rest[1]
    ) ** 2 / rest[1]
    freedom = int(often.sum())
    assert freedom > 10
    assert float(statistic) < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("config", [{}, {"time_conditioning": False}, {"adaln": False, "time_conditioning": False}])
def test_a_row_is_what_it_is_alone(config: dict[str, Any]) -> None:
    model = tiny("duo", **config)
    together = dl.denoise(model, PROMPTS, **RUN | {"seed": [4, 5, 6]})
    assert (together.canvases[:-1] != together.canvases[1:]).any()
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN | {"seed": 4 + row})
        kept = together.attention_mask[row]
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])
        assert together.open[:, row, kept].equal(alone.open[:, 0])
        assert alone.tokens[0, : len(prompt)].tolist() == prompt
    other = dl.denoise(model, PROMPTS, **RUN | {"seed": [4, 8, 6]})
    assert other.canvases[:, ::2].equal(together.canvases[:, ::2])
    assert not other.canvases[:, 1].equal(together.canvases[:, 1])


def test_temperature_0_writes_the_likeliest_token_or_noise() -> None:
    model = tiny("duo")
    run = dl.denoise(model, PROMPTS[1], temperature=0.0, **RUN)
    for step in range(run.steps):
        best = dit64(model, run.canvases[step], sigma=sigma_at(step))["logits"][0].argmax(-1)
        after, decided = run.canvases[step + 1, 0], ~run.open[step + 1, 0]
        assert after[3:][decided[3:]].equal(best[3:][decided[3:]])
    assert run.tokens[0, 3:].equal(best[3:])


def test_the_network_gets_the_level_of_the_step_in_runs_and_reruns() -> None:
    model: Any = tiny("duo")
    given: list[float] = []
    handle = model.model.sigma_map.register_forward_pre_hook(
        lambda _m, args: given.extend(args[0].unique().tolist())
    )
    run = dl.denoise(model, PROMPTS, **RUN)
    expected = [sigma_at(step) for step in range(9)]
    assert given == pytest.approx(expected, rel=1e-4, abs=1e-8)
    given.clear()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **RUN)
    again = dl.received_over_steps(model, run)
    handle.remove()
    assert given == pytest.approx(expected * 2, rel=1e-4, abs=1e-8)
    torch.testing.assert_close(again.values, dl.received_of(recording).values, equal_nan=True)
    pattern = dit64(model, run.canvases[3, 1:2], sigma=expected[3])["pattern1"]
    sums = dl.received_of(recording).column_sums[3, 1, 1].double()
    torch.testing.assert_close(sums, pattern[0].sum(-2), atol=2e-5, rtol=2e-4)
    assert dl.find_sinks(recording, dl.TopK(1)).is_sink.any()


def test_a_hidden_column_is_hidden() -> None:
    model = tiny("duo")
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[1:2], hooks=[mask_positions(1)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    visible = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    visible[..., 1] = False
    for step in range(run.steps):
        sigma = sigma_at(step)
        expected = dit64(model, run.canvases[step], visible, sigma=sigma)["logits"]
        torch.testing.assert_close(seen[step].double(), expected, atol=2e-5, rtol=2e-4)


def test_traces_resume_and_stored_recordings(tmp_path: Path) -> None:
    model, reducers = tiny("duo"), [dl.ReceivedAttention(min_viewers=1)]
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[1]:
            modulation = lm.model.layers[0].modulation.output.save()
            pattern = lm.layers[0].attn.pattern.save()
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert modulation.shape == (3, 192)
    sigma = sigma_at(1)
    expected = dit64(model, plain.canvases[1, 1:2], sigma=sigma)["pattern0"]
    torch.testing.assert_close(pattern[1:2].double(), expected, atol=2e-5, rtol=2e-4)
    whole = dl.record(model, PROMPTS, reducers, **RUN)
    resumed = resumed_recording(model, tmp_path / "rec", 5, PROMPTS, reducers, **RUN)
    for other in (resumed, dl.Recording.load(tmp_path / "rec")):
        for name in ("canvases", "open", "unmasked", "revised", "proposals"):
            assert getattr(other.run, name).equal(getattr(whole.run, name)), name
        assert torch.equal(dl.received_of(other).values.nan_to_num(), dl.received_of(whole).values.nan_to_num())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_removal": True}, "noise_removal is True; it must be one of ancestral, greedy, none"),
        ({"gen_length": 0}, "gen_length is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"eps": 1.0}, "eps is 1.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
        ({"predictor": "ddpm"}, "has no setting 'predictor'"),
        ({"p_nucleus": 0.9}, "top_p"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("duo"), [5, 6], **{"gen_length": 4, "steps": 2} | settings)


def test_steps_are_as_many_as_tokens_where_they_are_not_given() -> None:
    assert dl.denoise(tiny("duo"), "", gen_length=4).steps == 5
    assert dl.denoise(tiny("duo"), "", gen_length=4, steps=2, noise_removal="none").steps == 2


@pytest.mark.parametrize("family", ["duo", "mdlm"])
def test_the_lens_has_the_noise_level_of_its_step(family: str) -> None:
    model = tiny(family, time_conditioning=True)
    run = dl.denoise(model, PROMPTS[1:2], **RUN)
    lens = dl.logit_lens(model, run, top=3)
    for step in range(run.steps):
        here = (lens.step == step) & (lens.position >= 3)
        last = dit64(model, run.canvases[step], sigma=sigma_at(step))
        best = last["logits"][0].softmax(-1).topk(3).values[lens.position[here]]
        torch.testing.assert_close(lens.top_probabilities[here, -1].double(), best, atol=1e-5, rtol=1e-4)
        # The first layer's stream through the last norm at the step's level, as a float64 network has it.
        weights = {name: value.double() for name, value in model.state_dict().items()}
        stream = last["resid0"][0]
        normed = torch.nn.functional.layer_norm(stream, stream.shape[-1:], eps=1e-5)
        normed = normed * weights["model.norm.norm_final.weight"]
        shift, scale = last["final_modulation"]
        first = (normed * (1 + scale) + shift) @ weights["lm_head.weight"].T + weights["lm_head.bias"]
        best = first.softmax(-1).topk(3).values[lens.position[here]]
        torch.testing.assert_close(lens.top_probabilities[here, 0].double(), best, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["duo", "sedd"])
def test_what_a_sink_writes_is_read_at_the_level_of_its_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny(family)
    run = dl.denoise(model, PROMPTS[1:2], **RUN)
    sinks = dl.find_sinks(dl.received_over_steps(model, run), dl.TopK(1))
    every, heads = dl.probes.sink_writes(model, run, sinks, limit=1000), 8
    for step in (0, run.steps // 2, run.steps - 1):
        alone = dl.probes.sink_writes(model, run, sinks, steps=[step], limit=1000)
        kept, own = every.sink & (every.step == step), alone.sink
        assert int(kept.sum()) == int(own.sum()) == heads
        for name in ("layer", "head", "position", "norm", "entropy"):
            torch.testing.assert_close(getattr(every, name)[kept], getattr(alone, name)[own])
    # At another level the same vectors are other distributions.
    monkeypatch.setattr(StoredRun, "sigma", property(lambda _: 0.0))
    flat = dl.probes.sink_writes(model, run, sinks, limit=1000)
    assert flat.norm.equal(every.norm)
    assert not torch.allclose(flat.entropy, every.entropy, atol=1e-3)


def test_input_norms_count_the_noise_level_at_every_position_of_its_row() -> None:
    """It raised, or took rows for positions: what the modulation reads is of a row, and not of a position."""
    model: Any = tiny("duo")
    run = dl.denoise(model, PROMPTS, **RUN)
    found = dl.probes.input_norms(model, run).values["model.layers.0.modulation"]
    expected = torch.zeros(16, dtype=torch.float64)
    positions = int(run.attention_mask.sum())
    for step in range(run.steps):
        condition = model.model.sigma_map(torch.tensor([sigma_at(step)]))[0].detach().double()
        expected += (positions * condition**2).sqrt()
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
