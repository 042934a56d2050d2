"""SEDD's sampler by default: its distribution in float64, rows, noise levels; recordings, hooks, likelihoods."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling.samplers.mdlm import Times
from dlm_lens.sampling.samplers.sedd import SEDDPropose, SEDDSettings, original_weights, times_of
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.interrupted import resumed_recording

PROMPTS: list[list[int]] = [[], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 10, "steps": 12, "seed": 4}


def time_of(step: int, steps: int = 12) -> float:
    return 1 - step * (1 - 1e-5) / steps


def sigma_of(t: float) -> float:
    return -math.log(1 - 0.999 * t)


def ratios(model: Any, canvas: Tensor, t: float, masked: Tensor) -> Tensor:
    """Exp(logits) / N of a float64 network at masked positions, without [MASK]."""
    return dit64(model, canvas, sigma=sigma_of(t))["logits"][0, masked][:, :63].exp() / 63


def posterior(scores: Tensor, t: float, s: float, predictor: str) -> Tensor:
    """Probabilities of the next token and [MASK] by the definitions of 2310.16834 with whole matrices.

    `scores` [63] are p(x with y) / p(x) at a [MASK]. exp(sigma Q) with Q = E - I, where every column of E is that
    of [MASK]: the absorbing process.
    """
    size = len(scores) + 1
    generator = -torch.eye(size, dtype=torch.float64)
    generator[-1] += 1  # [to, from]: everything becomes [MASK]
    whole = torch.cat([scores, torch.ones(1, dtype=torch.float64)])
    if predictor == "euler":
        slope = 0.999 / (1 - 0.999 * t)
        rates = generator[-1] * whole  # into [MASK] of the forward process, reversed by the ratio
        found = (t - s) * slope * rates
        found[-1] = 1 - found[:-1].sum()
        return found
    change = sigma_of(t) - sigma_of(s)
    forward = torch.linalg.matrix_exp(change * generator)
    backward = torch.linalg.matrix_exp(-change * generator)
    return (backward @ whole) * forward[-1]


@pytest.mark.parametrize("predictor", ["analytic", "euler"])
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.9), (0.5, 0.25), (0.1, 1e-5), (1.0, 1e-5)])
def test_weights_are_the_posterior_of_the_process(predictor: str, t: float, s: float) -> None:
    """Both predictors in exact numbers: u q and 1 - u Z, u = (t - s) / t, by matrix exponentials."""
    q = torch.rand(63, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 40
    found = posterior(q / (math.exp(sigma_of(t)) - 1), t, s, predictor)
    share = (t - s) / t
    torch.testing.assert_close(found[:-1], share * q, atol=1e-12, rtol=1e-9)
    assert float(found[-1]) == pytest.approx(1 - share * float(q.sum()), rel=1e-9)


@pytest.mark.parametrize("predictor", ["analytic", "euler"])
def test_times_of_a_run(predictor: str) -> None:
    settings = SEDDSettings(steps=12, gen_length=10, predictor=predictor)
    for step in range(12):
        times = times_of(settings, step)
        t, s = time_of(step), time_of(step + 1)
        assert times == pytest.approx((sigma_of(t), (t - s) / t, s / t, True), rel=1e-4, abs=1e-6)
    assert times_of(settings, 12) == pytest.approx((sigma_of(1e-5), 1.0, 0.0, True), rel=1e-4)


@pytest.mark.parametrize(("predictor", "steps"), [("analytic", 12), ("euler", 12), ("analytic", 3), ("euler", 3)])
def test_proposals_and_confidences_are_the_draws_of_a_float64_network(predictor: str, steps: int) -> None:
    """One draw over tokens and [MASK] from the posterior, with the numbers of the row's generator."""
    model = tiny("sedd")
    run = dl.denoise(model, PROMPTS[1], predictor=predictor, **RUN | {"steps": steps})
    generator = torch.Generator().manual_seed(4)
    crossed = 0
    for step in range(run.steps):
        masked, t, s = run.masked[step, 0], time_of(step, steps), time_of(step + 1, steps)
        last = step == steps
        q = ratios(model, run.canvases[step], 1e-5 if last else t, masked)
        scores = q / (math.exp(sigma_of(t)) - 1) if not last else q
        weights = [torch.cat([one, one[:1] * 0]) if last else posterior(one, t, s, predictor) for one in scores]
        uniform = torch.rand(len(q), 63 if last else 64, generator=generator, dtype=torch.float64)
        gumbel = torch.cat([-uniform.log(), torch.ones(len(q), 1)], 1) if last else -uniform.log()
        draws = torch.stack(weights).clamp(min=0) / gumbel
        crossed += sum(float(one[-1]) < 0 for one in weights)
        expected = run.canvases[step, 0].masked_scatter(masked, draws.argmax(-1))
        assert run.canvases[step + 1, 0].equal(expected), step
        best = draws[:, :63].amax(-1)
        torch.testing.assert_close(
            run.confidence[step, 0][masked].double(), best / (best + draws[:, 63]), atol=1e-4, rtol=1e-3
        )
    assert not run.masks_left.any()
    if steps == 3:
        assert crossed  # the ratios of a random network leave less than nothing to [MASK] at some positions


def test_a_row_is_what_it_is_alone() -> None:
    model = tiny("sedd")
    together = dl.denoise(model, PROMPTS, **RUN | {"seed": [4, 5, 6]})
    assert not together.masks_left.any()
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN | {"seed": 4 + row})
        kept = together.attention_mask[row]
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.canvases[alone.steps :, row, kept].unique(dim=0).shape[0] == 1
        assert alone.tokens[0, : len(prompt)].tolist() == prompt


class Calibrated:
    """Shifts a head's bias so that the ratios of an empty canvas have the sum `total` at time 1."""

    def __init__(self, total: float) -> None:
        self.model: Any = tiny("sedd", max_position_embeddings=256)
        with torch.no_grad():
            for layer in self.model.model.layers:  # the same logits at every position and canvas
                layer.modulation.weight.zero_()
                layer.modulation.bias.zero_()
            self.model.model.norm.modulation.weight.zero_()
            self.model.model.embed_tokens.weight.copy_(self.model.model.embed_tokens.weight[63].expand(64, -1))
            logits = self.model(input_ids=torch.full((1, 4), 63)).logits[0, 0, :63]
            self.model.lm_head.bias += math.log(total * 63) - float(logits.logsumexp(-1))
        self.likely = self.model(input_ids=torch.full((1, 4), 63)).logits[0, 0, :63].double().softmax(-1)
        self.likely = self.likely.detach()


@pytest.mark.parametrize(("total", "quirks"), [(1.0, False), (1.0, True), (0.5, False), (1.6, True)])
def test_how_many_are_unmasked_and_which_tokens(total: float, quirks: bool) -> None:
    """Until step k each mask stays with probability prod (1 - Z d / t), and a token is drawn from p."""
    model, steps, length = Calibrated(total), 10, 200
    seed: Any = 2 if quirks else list(range(10))
    run = dl.denoise(model.model, [[]] * 10, gen_length=length, steps=steps, seed=seed, reference_quirks=quirks)
    count, stays = 10 * length, 1.0
    for step in range(steps):
        t = time_of(step, steps)
        stays *= max(0.0, 1 - total * (1 - 1e-5) / steps / t)
        left = float((run.canvases[step + 1] == 63).sum())
        # Four standard deviations of a binomial number.
        assert left == pytest.approx(count * stays, abs=4 * (count * stays * (1 - stays)) ** 0.5 + 1e-9), step
    assert not run.masks_left.any()
    drawn = run.tokens.flatten().bincount(minlength=63)[:63].double()
    expected = model.likely * count
    # Chi squared with 62 degrees of freedom: mean 62, four standard deviations of sqrt(124).
    assert float(((drawn - expected) ** 2 / expected).sum()) < 62 + 4 * 124**0.5


def test_temperature_and_noise_removal() -> None:
    model = tiny("sedd")
    greedy = dl.denoise(model, PROMPTS[1], temperature=0.0, **RUN)
    for step in range(greedy.steps):
        masked = greedy.masked[step, 0]
        q = ratios(model, greedy.canvases[step], time_of(step) if step < 12 else 1e-5, masked)
        assert greedy.proposals[step, 0][masked].equal(q.argmax(-1))
    few = {"gen_length": 30, "steps": 2, "eps": 0.5, "seed": 0}
    left = dl.denoise(model, [[]], noise_removal=False, **few)
    assert left.steps == 2
    assert left.masks_left.item() > 0
    whole = dl.denoise(model, [[]], **few)
    assert whole.canvases[:3].equal(left.canvases)
    assert not whole.masks_left.any()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_changes_tokens_and_no_rate(temperature: float) -> None:
    """P^(1 / temperature) with the same sum, in the weights of both paths."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = logits[:, :63].exp() / 63
    sharper = (plain.log() / temperature).softmax(-1) * plain.sum(-1, keepdim=True)
    settings = SEDDSettings(steps=8, gen_length=4, temperature=temperature)
    for quirks in (False, True):
        propose = SEDDPropose(settings, None, 63, reference_quirks=quirks)  # type: ignore[arg-type]
        propose.index, propose.times = 3, times_of(settings, 3)  # type: ignore[assignment]
        tokens, masked = propose.weights(logits.float())
        share = 1 / 8 / (1 - 3 / 8)
        torch.testing.assert_close(tokens[:, :63].double(), sharper * share, atol=1e-6, rtol=1e-3)
        expected = (1 - share * plain.sum(-1)).clamp(min=0)
        torch.testing.assert_close(torch.as_tensor(masked).double(), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("total", [0.02, 30.0])
def test_the_sum_of_the_ratios_is_the_rate(total: float) -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, :63] += math.log(63 * total) - logits[:, :63].logsumexp(-1, keepdim=True)
    settings = SEDDSettings(steps=100, gen_length=4)
    for quirks in (False, True):
        propose = SEDDPropose(settings, None, 63, reference_quirks=quirks)  # type: ignore[arg-type]
        propose.times = times_of(settings, 0)  # type: ignore[assignment]
        tokens, masked = propose.weights(logits.float())
        torch.testing.assert_close(tokens[:, :63].double(), logits[:, :63].exp() / 63 / 100, atol=1e-6, rtol=1e-3)
        assert torch.as_tensor(masked).tolist() == pytest.approx([1 - total / 100] * 5, rel=1e-3)


def test_the_removal_of_noise_is_the_same_for_both_predictors() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    found = [
        original_weights(logits, 63, SEDDSettings(steps=4, gen_length=3, predictor=one, eps=0.6), 4)
        for one in ("analytic", "euler")
    ]
    assert found[0].equal(found[1])
    torch.testing.assert_close(found[0][:, :63], logits[:, :63].exp() / 63, atol=1e-6, rtol=1e-5)
    assert found[0][:, 63].eq(0).all()


def test_numbers_at_the_edges() -> None:
    """Ratios whose sum no float holds write every mask; nothing is NaN; the last step has no weight for [MASK]."""

    class Half:
        def column_rows(self, evaluated: Tensor, eligible: Tensor, width: int) -> Tensor:
            return torch.full((1, width), 0.5, dtype=torch.float64)

    settings, every = SEDDSettings(steps=4, gen_length=1), torch.ones(1, 1, dtype=torch.bool)
    propose = SEDDPropose(settings, Half(), 3, reference_quirks=False)  # type: ignore[arg-type]
    for index, logits, unmasked in (
        (0, [0.0, 1000.0, 9.0, 20.0], True),
        (0, [-1000.0, -900.0, -1000.0, 20.0], False),
        (4, [-1000.0, -900.0, -1000.0, 20.0], True),
        (4, [0.0, 1000.0, 9.0, 20.0], True),
    ):
        propose.index, propose.times = index, times_of(settings, index)  # type: ignore[assignment]
        proposal = propose(torch.tensor([[3]]), torch.tensor([logits]), every, every)
        assert proposal.tokens.tolist() == [[1]], (index, logits)
        assert (float(proposal.confidence) >= 0.5) is unmasked
        assert index < 4 or float(proposal.confidence) == 1
    one = original_weights(torch.zeros(1, 4), 3, settings, 4)
    # 1 - exp(-1e-5) has a relative error of 2e-3 in the original's float32, the same for all tokens.
    torch.testing.assert_close(one, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]), atol=1e-6, rtol=5e-3)
    assert one[0, :3].unique().shape == (1,)
    assert times_of(SEDDSettings(steps=1, gen_length=1), 0)[1:3] == pytest.approx((1 - 1e-5, 1e-5))
    assert isinstance(times_of(settings, 0), Times)


def test_the_network_gets_the_level_of_the_step_in_runs_and_reruns() -> None:
    model: Any = tiny("sedd")
    given: list[float] = []

    def listen(_module: Any, args: tuple[Tensor, ...]) -> None:
        given.extend(args[0].unique().tolist())

    handle = model.model.sigma_map.register_forward_pre_hook(listen)
    run = dl.denoise(model, PROMPTS, **RUN)
    expected = [sigma_of(time_of(step)) for step in range(12)] + [sigma_of(1e-5)]
    assert given == pytest.approx(expected[: run.steps], rel=1e-4)
    given.clear()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **RUN)
    again = dl.received_over_steps(model, run)
    handle.remove()
    assert given == pytest.approx(expected[: run.steps] * 2, rel=1e-4)
    torch.testing.assert_close(again.values, dl.received_of(recording).values, equal_nan=True)
    patterns = dit64(model, run.canvases[3, 1:2], sigma=expected[3])["pattern1"]
    sums = dl.received_of(recording).column_sums[3, 1, 1].double()
    torch.testing.assert_close(sums, patterns[0].sum(-2), atol=2e-5, rtol=2e-4)
    assert dl.find_sinks(recording, "top-k:1").is_sink.any()


def test_a_hidden_column_is_hidden() -> None:
    model = tiny("sedd")
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[1:2], hooks=[mask_positions(1)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    visible = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    visible[..., 1] = False
    for step in range(run.steps):
        sigma = sigma_of(time_of(step) if step < 12 else 1e-5)
        expected = dit64(model, run.canvases[step], visible, sigma=sigma)["logits"]
        torch.testing.assert_close(seen[step].double(), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("hooks", [[], [mask_positions(1)]])
def test_the_lens_has_the_noise_level_of_its_step(hooks: list[Any]) -> None:
    model: Any = tiny("sedd")
    run = dl.denoise(model, PROMPTS[1:2], **RUN)
    lens = dl.logit_lens(model, run, steps=[2, 7], top=3, hooks=hooks)
    visible = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    visible[..., 1] = False
    for place, step in enumerate((2, 7)):
        here = lens.step == step
        assert int(here.sum()) == 13
        passes = [(lens, None)] + ([(lens.hooked, visible)] if hooks else [])
        for found, seen in passes:
            logits = dit64(model, run.canvases[step], seen, sigma=sigma_of(time_of(step)))["logits"][0]
            best = logits.softmax(-1).topk(3).values
            torch.testing.assert_close(found.top_probabilities[here, -1].double(), best, atol=1e-5, rtol=1e-4)
        # The level of another step is another distribution.
        other = dit64(model, run.canvases[step], sigma=sigma_of(time_of((9, 1)[place])))["logits"][0]
        assert (other.softmax(-1).topk(3).values - lens.top_probabilities[here, -1]).abs().max() > 1e-3


def test_a_tuned_lens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w5 w9 w14 w3 " * 40)
    with pytest.raises(ValueError, match="a tuned lens is trained without one"):
        dl.probes.train_tuned_lens(tiny("sedd"), tmp_path / "text.txt", length=16)


def test_infilling_keeps_what_is_written() -> None:
    """The original's projection of prefix and suffix: written tokens stay in every canvas."""
    model = tiny("sedd")
    prompt = [5, 63, 63, 9, 63, 7]
    run = dl.denoise(model, [prompt, [1, 2]], gen_length=4, steps=6, seed=1)
    assert (run.canvases[:, 0, [0, 3, 5]] == torch.tensor([5, 9, 7])).all()
    assert not run.masks_left.any()
    alone = dl.denoise(model, [prompt], gen_length=4, steps=6, seed=1)
    assert run.tokens[0].equal(alone.tokens[0])
    only = dl.denoise(model, [prompt], gen_length=0, seed=1)
    assert only.settings["steps"] == 3


def test_traces_resume_and_stored_recordings(tmp_path: Path) -> None:
    model = tiny("sedd")
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[1]:
            modulation = lm.model.layers[0].modulation.output.save()
            pattern = lm.layers[0].attn.pattern.save()
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert modulation.shape[-1] == 192
    expected = dit64(model, plain.canvases[1, 1:2], sigma=sigma_of(time_of(1)))["pattern0"]
    torch.testing.assert_close(pattern[1:2].double(), expected, atol=2e-5, rtol=2e-4)
    whole = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **RUN)
    resumed = resumed_recording(model, tmp_path / "rec", 5, PROMPTS, [dl.ReceivedAttention()], **RUN)
    for other in (resumed, dl.Recording.load(tmp_path / "rec")):
        assert other.run.canvases.equal(whole.run.canvases)
        assert torch.equal(dl.received_of(other).values.nan_to_num(), dl.received_of(whole).values.nan_to_num())


def test_the_likelihood_is_the_score_entropy_with_masks_drawn_by_hand() -> None:
    """Sigma' times the score entropy of a float64 network, by its definition in the paper (section 3)."""
    model = tiny("sedd")
    prompt, answer = [5, 9], [14, 3, 8]
    found = dl.log_likelihood(model, prompt, answer, samples=6, strata=3, seed=7)
    generator, losses, normalised = torch.Generator().manual_seed(7), [], []
    for _ in range(2):
        times = 0.999 * torch.rand(3, generator=generator) + 1e-3
        uniform = torch.rand(3, 5, generator=generator)
        for t, row in zip(times.tolist(), uniform, strict=True):
            masked = [2 + i for i in range(3) if row[2 + i] < 0.999 * t]
            ids = torch.tensor([prompt + answer])
            ids[0, masked] = 63
            logits = dit64(model, ids, sigma=sigma_of(t))["logits"][0, :, :63]
            scores = logits.exp() / 63 / (math.exp(sigma_of(t)) - 1)
            ratio, slope = 1 / (math.exp(sigma_of(t)) - 1), 0.999 / (1 - 0.999 * t)
            one = other = 0.0
            for place in masked:
                token = (prompt + answer)[place]
                entropy = scores[place].sum() - ratio * scores[place, token].log() + ratio * (math.log(ratio) - 1)
                one += slope * float(entropy)
                other -= float(logits[place].log_softmax(-1)[token]) / t
            losses.append(one)
            normalised.append(other)
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-4)
    assert any(losses)
    assert found.value.item() == pytest.approx(-sum(losses) / 6, rel=1e-4)
    assert sum(losses) > sum(normalised) + 0.1  # Z - 1 - ln Z of a random network's ratios
    chain = dl.log_likelihood(model, prompt, answer, "chain_rule")
    first = dit64(model, torch.tensor([[5, 9, 63, 63, 63]]), sigma=sigma_of(0.6))["logits"][0, 2, :63]
    assert float(chain.losses[0][0]) == pytest.approx(-float(first.log_softmax(-1)[14]), rel=1e-5)
    even = dl.log_likelihood(model, prompt, answer, samples=8, stratified=True)
    assert even.settings["stratified"] is True
    assert even.value.isfinite().all()


def test_ratios_that_sum_to_one_have_mdlms_bound() -> None:
    model = Calibrated(1.0)
    found = dl.log_likelihood(model.model, [], [14, 3, 8], samples=40, strata=1, seed=1)
    likely = -float(model.likely[[14, 3, 8]].log().sum())
    # Every mask's loss is -ln p: the mean over masks and times is -ln p of the text, within five standard errors.
    assert -found.value.item() == pytest.approx(likely, abs=5 * found.standard_error.item())
    generator = torch.Generator().manual_seed(1)
    for sample in range(3):
        t = 0.999 * float(torch.rand(1, generator=generator)) + 1e-3
        masked = torch.rand(1, 3, generator=generator)[0] < 0.999 * t
        expected = -float(model.likely[torch.tensor([14, 3, 8])[masked]].log().sum()) / t
        assert float(found.losses[0][sample]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_what_cannot_be() -> None:
    model = tiny("sedd")
    with pytest.raises(ValueError, match="predictor is 'ddpm'; it must be one of analytic, euler"):
        dl.denoise(model, "", gen_length=4, predictor="ddpm")
    with pytest.raises(ValueError, match="no setting 'cfg_scale'"):
        dl.denoise(model, "", gen_length=4, cfg_scale=1.0)
    with pytest.raises(ValueError, match="stratified is 1; it must be True or False"):
        dl.log_likelihood(model, [], [3], stratified=1)
    with pytest.raises(ValueError, match="not a model of type 'sedd'"):
        dl.bridge(model)
