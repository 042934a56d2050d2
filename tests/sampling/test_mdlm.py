"""MDLM's sampler by default: rows, ends, reuse, noise levels; recordings, hooks and lenses on a DiT."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling.noise import SharedNoise
from dlm_lens.sampling.samplers.bd3lm import BD3LMPropose, BD3LMSettings
from dlm_lens.sampling.samplers.duo import DuoPropose, DuoSettings
from dlm_lens.sampling.samplers.mdlm import AncestralPropose, MDLMSettings, Times, times_of
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.interrupted import resumed_recording

PROMPTS: list[list[int]] = [[], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 12, "seed": 4}


@pytest.mark.parametrize("config", [{}, {"time_conditioning": True}, {"adaln": False}])
def test_a_row_is_what_it_is_alone(config: dict[str, Any]) -> None:
    model = tiny("mdlm", **config)
    together = dl.denoise(model, PROMPTS, **RUN)
    assert not together.masks_left.any()
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN)
        kept = together.attention_mask[row]
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.canvases[alone.steps :, row, kept].unique(dim=0).shape[0] == 1
        assert alone.tokens[0, : len(prompt)].tolist() == prompt


@pytest.mark.parametrize("predictor", ["ddpm", "ddpm_cache"])
def test_the_network_runs_where_the_canvas_has_changed(predictor: str) -> None:
    model = tiny("mdlm")
    passes: list[int] = []
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    run = dl.denoise(model, PROMPTS[1], gen_length=4, steps=40, predictor=predictor)
    handle.remove()
    changed = [True, *(bool(one.any()) for one in run.unmasked[:-1])]
    assert len(passes) == sum(changed) < run.steps
    assert run.unmasked[-1].any()  # the run ends with its last mask
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    recorded = dl.record(model, [PROMPTS[1]], reducers, gen_length=4, steps=40, predictor=predictor)
    assert recorded.run.canvases.equal(run.canvases)
    assert dl.received_of(recorded).values.isfinite().any(-1).all()  # every step was seen


def test_proposals_and_confidences_are_the_draws_of_a_float64_network() -> None:
    """One draw over tokens and [MASK], as the paper has it, with the numbers of the row's generator."""
    model = tiny("mdlm")
    run = dl.denoise(model, PROMPTS[1], **RUN)
    generator = torch.Generator().manual_seed(4)
    settings = MDLMSettings(steps=12, gen_length=10)
    for step in range(run.steps):
        masked = run.masked[step, 0]
        likely = dit64(model, run.canvases[step])["logits"][0, masked]
        likely[:, 63] = -torch.inf
        uniform = torch.rand(int(masked.sum()), 64, generator=generator, dtype=torch.float64)
        t, s = 1 - step * (1 - 1e-5) / 12, 1 - (step + 1) * (1 - 1e-5) / 12
        assert times_of(settings, step)[1:3] == pytest.approx((t - s, s), rel=1e-5, abs=1e-6)
        weights = likely.softmax(-1) * (t - s)
        weights[:, 63] = s
        drawn = (weights / -uniform.log()).argmax(-1)
        expected = run.canvases[step, 0].masked_scatter(masked, drawn)
        assert run.canvases[step + 1, 0].equal(expected), step
        scores = weights / -uniform.log()
        best = scores[:, :63].amax(-1)
        torch.testing.assert_close(
            run.confidence[step, 0][masked].double(), best / (best + scores[:, 63]), atol=1e-4, rtol=1e-4
        )


def test_how_many_are_unmasked_is_the_schedules() -> None:
    """Of many masks a share (m(t) - m(s)) / m(t) is unmasked: 1 / 10 at the first of ten steps."""
    model = tiny("mdlm")
    run = dl.denoise(model, [[]] * 8, gen_length=100, steps=10, seed=list(range(8)))
    left = run.masked.sum(-1).double()
    assert run.counts[0].sum() == pytest.approx(80, abs=4 * (800 * 0.1 * 0.9) ** 0.5)
    # The share that stays until step k is 1 - k / 10: four standard deviations of a binomial number.
    for step in range(1, 10):
        share = 1 - step / 10
        assert float(left[step].sum()) == pytest.approx(800 * share, abs=4 * (800 * share * (1 - share)) ** 0.5)


def test_temperature_and_noise_removal() -> None:
    model = tiny("mdlm")
    greedy = dl.denoise(model, PROMPTS[1], temperature=0.0, **RUN)
    for step in range(greedy.steps):
        masked = greedy.masked[step, 0]
        logits = dit64(model, greedy.canvases[step])["logits"][0]
        logits[:, 63] = -torch.inf
        assert greedy.proposals[step, 0][masked].equal(logits.argmax(-1)[masked])
    few = {"gen_length": 30, "steps": 2, "eps": 0.5, "seed": 0}
    left = dl.denoise(model, [[]], noise_removal=False, **few)
    assert left.steps == 2
    assert left.masks_left.item() > 0
    whole = dl.denoise(model, [[]], **few)
    assert whole.canvases[:3].equal(left.canvases)
    last = dit64(model, left.tokens)["logits"][0]
    last[:, 63] = -torch.inf
    assert whole.tokens[0].equal(torch.where(left.masked[-1, 0], last.argmax(-1), left.tokens[0]))


def test_a_conditioned_network_gets_the_level_of_the_step_in_runs_and_reruns() -> None:
    model: Any = tiny("mdlm", time_conditioning=True)
    conditioned: list[float] = []

    def listen(_module: Any, args: tuple[Tensor, ...]) -> None:
        conditioned.extend(args[0].unique().tolist())

    handle = model.model.sigma_map.register_forward_pre_hook(listen)
    run = dl.denoise(model, PROMPTS, **RUN)
    expected = [-torch.log(torch.tensor(1 - 0.999 * (1 - step * (1 - 1e-5) / 12))).item() for step in range(12)]
    assert conditioned == pytest.approx(expected[: run.steps], rel=1e-4)
    conditioned.clear()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **RUN)
    again = dl.received_over_steps(model, run)
    handle.remove()
    assert conditioned == pytest.approx(expected[: run.steps] * 2, rel=1e-4)
    torch.testing.assert_close(again.values, dl.received_of(recording).values, equal_nan=True)
    logits = dit64(model, run.canvases[3, 1:2], sigma=expected[3])["pattern1"]
    sums = dl.received_of(recording).column_sums[3, 1, 1].double()
    torch.testing.assert_close(sums, logits[0].sum(-2), atol=2e-5, rtol=2e-4)


def test_a_hidden_column_is_hidden() -> None:
    model = tiny("mdlm")
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[1:2], hooks=[mask_positions(1)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    visible = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    visible[..., 1] = False
    for step in range(run.steps):
        expected = dit64(model, run.canvases[step], visible)["logits"]
        torch.testing.assert_close(seen[step].double(), expected, atol=2e-5, rtol=2e-4)


def test_a_pass_is_kept_for_the_same_canvas_alone() -> None:
    """Most of these steps decide nothing; what changes the prompt between two of them is seen."""
    model, given = tiny("mdlm"), {"gen_length": 3, "steps": 60, "seed": 2}

    def edited(step: int, canvas: Tensor) -> Tensor:
        return canvas.index_fill(-1, torch.tensor([0]), 20 + step % 30)

    kept, every = (
        dl.denoise(model, [[5, 6, 7]], on_canvas=edited, logits=each, **given) for each in ("needed", "all")
    )
    assert kept.canvases.equal(every.canvases)
    assert kept.proposals[:, 0, 3:].equal(every.proposals[:, 0, 3:])
    assert (kept.counts == 0).sum() > 30


def test_the_lens_applies_the_last_modulation() -> None:
    model = tiny("mdlm")
    run = dl.denoise(model, PROMPTS[1:2], **RUN)
    lens = dl.logit_lens(model, run, steps=[2], top=3)
    best = dit64(model, run.canvases[2])["logits"][0].softmax(-1).topk(3).values
    found = lens.top_probabilities[:, -1]
    torch.testing.assert_close(found.double(), best, atol=1e-5, rtol=1e-4)


def test_traces_resume_and_stored_recordings(tmp_path: Path) -> None:
    model = tiny("mdlm")
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[1]:
            modulation = lm.model.layers[0].modulation.output.save()
            pattern = lm.layers[0].attn.pattern.save()
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert modulation.shape == (1, 192)
    expected = dit64(model, plain.canvases[1, 1:2])["pattern0"]
    torch.testing.assert_close(pattern[1:2].double(), expected, atol=2e-5, rtol=2e-4)
    whole = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **RUN)
    resumed = resumed_recording(model, tmp_path / "rec", 5, PROMPTS, [dl.ReceivedAttention()], **RUN)
    for other in (resumed, dl.Recording.load(tmp_path / "rec")):
        assert other.run.canvases.equal(whole.run.canvases)
        assert torch.equal(dl.received_of(other).values.nan_to_num(), dl.received_of(whole).values.nan_to_num())


@pytest.mark.parametrize("conditioned", [False, True])
def test_the_likelihood_is_the_mean_over_random_masks(conditioned: bool) -> None:
    """-ln p / t at masked positions, with times and masks drawn by hand and a float64 network."""
    model = tiny("mdlm", time_conditioning=conditioned)
    prompt, answer = [5, 9], [14, 3, 8]
    found = dl.log_likelihood(model, prompt, answer, samples=6, strata=3, seed=7)
    generator, losses = torch.Generator().manual_seed(7), []
    for _ in range(2):
        start = torch.rand(3, generator=generator)
        times = [0.999 * float((start[i] / 3 + i / 3) % 1) + 1e-3 for i in range(3)]
        uniform = torch.rand(3, 5, generator=generator)
        for t, row in zip(times, uniform, strict=True):
            masked = [2 + i for i in range(3) if row[2 + i] < 0.999 * t]
            ids = torch.tensor([prompt + answer])
            ids[0, masked] = 63
            logits = dit64(model, ids, sigma=-math.log(1 - 0.999 * t) if conditioned else 0.0)["logits"][0]
            logits[:, 63] = -torch.inf
            logs = logits.log_softmax(-1)
            losses.append(sum(-float(logs[i, (prompt + answer)[i]]) for i in masked) / t)
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-5)
    assert any(losses)
    assert found.value.item() == pytest.approx(-sum(losses) / 6, rel=1e-5)
    alone = dl.log_likelihood(model, [], answer, samples=8)
    assert alone.value.isfinite().all()
    chain = dl.log_likelihood(model, prompt, answer, "chain_rule")
    first = dit64(
        model, torch.tensor([[5, 9, 63, 63, 63]]), sigma=-math.log(1 - 0.999 * 0.6) if conditioned else 0.0
    )
    first["logits"][..., 63] = -torch.inf
    assert float(chain.losses[0][0]) == pytest.approx(-float(first["logits"][0, 2].log_softmax(-1)[14]), rel=1e-5)


def test_numbers_at_the_edges() -> None:
    """u = 0 gives a token no chance; the last draw, with nothing left for [MASK], writes every mask."""

    class Zeros:
        def column_rows(self, evaluated: Tensor, eligible: Tensor, width: int) -> Tensor:
            values = torch.full((1, width), 0.5, dtype=torch.float64)
            values[0, 2] = 0.0
            return values

    propose = AncestralPropose(1.0, Zeros(), 3, reference_quirks=False)  # type: ignore[arg-type]
    propose.times = Times(0.0, 1.0, 0.0)  # type: ignore[assignment]
    every = torch.ones(1, 1, dtype=torch.bool)
    proposal = propose(torch.tensor([[3]]), torch.tensor([[0.0, 1.0, 9.0, 20.0]]), every, every)
    assert proposal.tokens.tolist() == [[1]]
    assert proposal.confidence.tolist() == [[1.0]]


def test_with_quirks_logarithms_have_the_dtype_of_the_logits() -> None:
    """The authors' MDLM and BD3-LM subtract a logsumexp, and their Duo has a log-softmax."""
    logits = 3 * torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    noise, tokens = SharedNoise(0), logits.index_fill(-1, torch.tensor(63), -1e6)
    logs = tokens - torch.logsumexp(tokens, -1, keepdim=True)
    mdlm = AncestralPropose(1.0, noise, 63, reference_quirks=True).probabilities(logits)
    assert mdlm.equal(logs.exp().float())
    blocks = BD3LMPropose(BD3LMSettings(4, 4), noise, 63, reference_quirks=True).probabilities(logits)
    assert blocks.equal(logs.double().exp())
    duo = DuoPropose(DuoSettings(4, 4), noise, reference_quirks=True).probabilities(logits)
    assert duo.equal(logits.log_softmax(-1).double().exp())
    exact = AncestralPropose(1.0, noise, 63, reference_quirks=False).probabilities(logits)
    torch.testing.assert_close(exact, tokens.double().softmax(-1))
    assert float((mdlm - exact).abs().max()) > 1e-3


def test_what_cannot_be() -> None:
    model = tiny("mdlm")
    with pytest.raises(ValueError, match="predictor is 'analytic'; it must be one of ddpm, ddpm_cache"):
        dl.denoise(model, "", gen_length=4, predictor="analytic")
    with pytest.raises(ValueError, match="no setting 'cfg_scale'"):
        dl.denoise(model, "", gen_length=4, cfg_scale=1.0)
    with pytest.raises(ValueError, match="eps is 2"):
        dl.denoise(model, "", gen_length=4, eps=2)
    with pytest.raises(ValueError, match=r"the prompt is empty or of an unknown kind: \[\]"):
        dl.denoise(model, [], gen_length=4)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        dl.denoise(tiny("llada"), "", gen_length=4)
    with pytest.raises(ValueError, match="the prompt is empty"):
        dl.denoise(tiny("llada"), torch.zeros(2, 0, dtype=torch.long), gen_length=4)
