"""ReMDM's sampler: the authors' code token for token, its probabilities by hand, rows, resumed runs, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import rerun
from dlm_lens.sampling.samplers.remdm import ReMDMSettings
from dlm_lens.testing import tiny
from tests.sampling.interrupted import resumed_as_unbroken

GOLDEN = Path(__file__).parent.parent / "golden"
RUNS = json.loads((GOLDEN / "remdm" / "sampling.json").read_text())["runs"]
PROMPTS: list[list[int]] = [[], [1, 2, 3], [9]]
RUN: dict[str, Any] = {"gen_length": 12, "steps": 16, "eta": 0.1, "seed": 4}
RULES = pytest.mark.parametrize("rule", ["cap", "rescale", "conf", "loop"])


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case["name"])
def test_reference_quirks_reproduce_the_original(case: dict[str, Any]) -> None:
    model = dl.load(GOLDEN / "mdlm", sampler="remdm", dtype=case["dtype"])
    prompts: list[list[int]] = [[]] * case["rows"]
    given = dict(case["settings"])
    if case["dtype"] == "bfloat16":
        # A processor's order of sums in bfloat16 would decide: the logits are those of float64, rounded.
        exact = dl.load(GOLDEN / "mdlm", dtype="float64")
        given["on_logits"] = lambda _step, canvas, logits: exact(input_ids=canvas).logits.to(logits)
    run = dl.denoise(model, prompts, seed=case["seed"], reference_quirks=True, **given)
    assert run.canvases[: len(case["canvases"])].tolist() == case["canvases"]
    assert run.tokens.tolist() == case["tokens"]


def test_some_stored_runs_mask_again() -> None:
    """What the comparison above is about; two steps of "loop" are too few."""
    mask = dl.load(GOLDEN / "mdlm").config.mask_token_id
    canvases = {case["name"]: torch.tensor(case["canvases"]) for case in RUNS}
    again = {name: int(((one[:-1] != mask) & (one[1:] == mask)).sum()) for name, one in canvases.items()}
    assert again.pop("loop_few_steps") == 0
    assert min(again.values()) > 10


@RULES
def test_a_row_is_what_it_is_alone(rule: str) -> None:
    model = tiny("mdlm", sampler="remdm")
    together = dl.denoise(model, PROMPTS, remasking=rule, **RUN)
    assert not together.masks_left.any()
    assert together.revised.any()
    for row, prompt in enumerate(PROMPTS):
        alone, kept = dl.denoise(model, [prompt], remasking=rule, **RUN), together.attention_mask[row]
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])
        assert alone.tokens[0, : len(prompt)].tolist() == prompt  # prompts are not masked


@pytest.mark.parametrize("rule", ["cap", "rescale"])
@pytest.mark.parametrize("eta", [0.0, 0.05, 0.4, 1.0])
def test_the_schedule_is_kept(rule: str, eta: float) -> None:
    """2503.00307, section 3: whatever sigma is, the share of decided positions at time s is alpha_s = 1 - s."""
    settings = ReMDMSettings(steps=40, gen_length=8, remasking=rule, eta=eta, eps=1e-3)
    schedule = torch.linspace(1, 1e-3, 41, dtype=torch.float64)
    sigmas = []
    for index in range(40):
        times, sigma = settings.step(index)
        alpha_t, alpha_s = float(1 - schedule[index]), float(1 - schedule[index + 1])
        # The times are float32, as the original's.
        assert (1 - sigma) * alpha_t + times.unmasked * (1 - alpha_t) == pytest.approx(alpha_s, abs=2e-6)
        assert times.unmasked + times.masked == pytest.approx(1, abs=1e-4)
        most = min(1.0, (1 - alpha_s) / alpha_t) if index else 1.0
        assert sigma == pytest.approx(min(eta, most) if rule == "cap" else eta * most, rel=1e-3, abs=1e-6)
        sigmas.append(sigma)
    assert (max(sigmas) > 0) == (eta > 0)


def test_decided_positions_are_masked_again_with_the_probability_of_the_step() -> None:
    model = tiny("mdlm", sampler="remdm", max_position_embeddings=512)
    settings: dict[str, Any] = {"gen_length": 100, "steps": 12, "eta": 0.3, "remasking": "cap"}
    run = dl.denoise(model, [[]] * 8, seed=list(range(8)), **settings)
    expected = variance = found = 0.0
    for step in range(12):
        sigma = ReMDMSettings(**settings).step(step)[1]
        decided = int((run.answer & ~run.open[step]).sum())
        found += int((~run.open[step] & run.open[step + 1]).sum())
        expected += sigma * decided
        variance += sigma * (1 - sigma) * decided
    assert expected > 500
    assert abs(found - expected) < 4 * variance**0.5  # four standard deviations of independent draws


def test_conf_masks_about_one_position_of_a_row_again() -> None:
    """Sigma is sigma_max <= 1 times a softmax over the row's decided positions, so that it sums to at most 1."""
    model = tiny("mdlm", sampler="remdm")
    run = dl.denoise(model, [[1, 2], [], [7]], remasking="conf", gen_length=40, steps=40, seed=[1, 2, 3])
    again = (~run.open[:-1] & run.open[1:]).sum(-1).float()
    schedule = torch.linspace(1, 1e-5, 41)[:-1]
    most = torch.minimum(torch.ones(()), (schedule - (1 - 1e-5) / 40) / (1 - schedule).clamp(min=1e-9))
    decided = (run.answer & ~run.open[:-1]).any(-1)
    expected = float((most[:, None].clamp(min=0) * decided[:-1]).sum())
    # A sum of independent draws has a variance of at most its mean.
    assert abs(float(again.sum()) - expected) < 4 * expected**0.5
    assert expected > 30


@RULES
def test_a_resumed_run_is_the_unbroken_one(rule: str, tmp_path: Path) -> None:
    model = tiny("mdlm", sampler="remdm")
    whole = resumed_as_unbroken(model, PROMPTS, tmp_path / "run", passes=9, remasking=rule, **RUN)
    again = rerun(model, whole.run, [dl.ReceivedAttention(min_viewers=1)])
    torch.testing.assert_close(again.received, whole.received, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"remasking": "capped"}, "remasking 'capped' is none of ReMDM's"),
        ({"eta": 1.5}, "eta is 1.5; it is a probability, from 0 to 1"),
        ({"t_on": 0.05, "t_off": 0.5}, "t_on is 0.05, t_off 0.5 and alpha_on 0.9; they must lie between 0 and 1"),
        ({"remasking": "loop", "eta": 0.2}, "eta is 0.2, and with alpha_on 0.9 a step can mask at most 0.1111"),
        ({"nucleus_p": 0}, "nucleus_p is 0; it must be above 0 and at most 1"),
        ({"predictor": "ddpm"}, "predictor is 'ddpm'; it must be one of ddpm_cache"),
        (
            {"remasking": "conf", "reference_quirks": True},
            "'conf': the authors' code keeps confidences in bfloat16 and fails where the network computes in "
            "torch.float32; load it with dtype='bfloat16'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(tiny("mdlm", sampler="remdm"), [[1]], gen_length=4, **given)


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_a_canvas_without_a_mask_takes_no_pass(time_conditioning: bool) -> None:
    """The authors' code makes one, of whose result nothing is read: the decided tokens are masked again or stay."""
    model: Any = tiny("mdlm", sampler="remdm", time_conditioning=time_conditioning)
    settings: dict[str, Any] = {"gen_length": 3, "steps": 24, "eta": 0.3, "seed": [4, 5]}
    passes: list[int] = []
    decoder, plain = model.get_decoder(), type(model.get_decoder()).forward

    def counted(*args: Any, **given: Any) -> Any:
        passes.append(1)
        return plain(decoder, *args, **given)

    decoder.forward = counted
    run = dl.denoise(model, [[1, 2], [3]], **settings)
    made = len(passes)
    every = dl.denoise(model, [[1, 2], [3]], logits="all", **settings)
    assert len(passes) - made == run.steps
    bare = int((run.open[:-1].flatten(1).sum(-1) == 0).sum())
    assert bare > 1
    assert made <= run.steps - bare
    if time_conditioning:
        assert made == run.steps - bare
    assert run.canvases.equal(every.canvases)
    assert run.unmasked.equal(every.unmasked)
    made = len(passes)
    hidden = dl.denoise(model, [[1, 2], [3]], hooks=[dl.hooks.mask_positions(0)], **settings)
    assert len(passes) - made >= hidden.steps  # every step is seen
