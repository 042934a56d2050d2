"""Every stored trajectory of SEDD's sampler, token for token, its weights, and its loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.likelihood.scoring import Query, Scorer
from dlm_lens.sampling.samplers.sedd import SEDDSettings, original_weights, score_entropy
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "sedd"
STORED = json.loads((GOLDEN / "sampling.json").read_text())


def run(setting: dict[str, Any], **options: Any) -> dl.DenoisingRun:
    """A run whose prompt is the first canvas of the original: its fixed tokens, and masks elsewhere."""
    given = setting["args"]
    length = given["length"]
    prompt = [40] * length
    for place, token in given["fixed"]:
        prompt[place] = token
    names = {"steps": "steps", "eps": "eps", "denoise": "noise_removal", "predictor": "predictor"}
    settings = {ours: given[theirs] for theirs, ours in names.items()}
    ids = torch.tensor([prompt] * given["batch"])
    return dl.denoise(loaded(GOLDEN), ids, gen_length=0, seed=setting["seed"], **settings, **options)


@pytest.mark.parametrize("setting", STORED["settings"], ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = run(setting, reference_quirks=True)
    handle.remove()
    assert len(passes) == setting["forwards"]
    assert found.canvases.equal(load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"])
    assert found.tokens.tolist() == setting["final"]
    assert found.counts.tolist() == setting["transferred_per_step"]
    assert found.masks_left.tolist() == setting["masks_left"]


def test_the_stored_runs_reach_what_they_are_for() -> None:
    """Steps at which the ratios' sum leaves no weight to the mask, masks left, and prompts on both sides."""
    settings = {setting["name"]: setting for setting in STORED["settings"]}
    assert sum(setting["negative_weights_of_the_mask"] for setting in settings.values()) >= 5
    assert sum(settings["left"]["masks_left"]) == 2
    assert [place for place, _ in settings["infilling"]["args"]["fixed"]] == [0, 1, 8, 9]
    # Far above the float32 noise of the weights, so that no other order of sums changes a token.
    assert min(setting["min_gumbel_margin"] for setting in settings.values()) > 1e-3


@pytest.mark.parametrize("setting", STORED["settings"], ids=lambda setting: setting["name"])
def test_by_default_another_stream_draws_other_tokens(setting: dict[str, Any]) -> None:
    found = run(setting)
    for place, token in setting["args"]["fixed"]:
        assert (found.canvases[..., place] == token).all()
    assert found.tokens.tolist() != setting["final"]
    assert bool(found.masks_left.any()) <= (not setting["args"]["denoise"])


@pytest.mark.parametrize("number", range(len(STORED["weights"])))
def test_weights_are_the_originals_in_its_dtypes(number: int) -> None:
    entry, tensors = STORED["weights"][number], load_file(GOLDEN / "sampling.safetensors")
    logits, expected = (tensors[f"weights.{number}.{name}"][0] for name in ("logits", "probs"))
    assert str(logits.dtype) == f"torch.{entry['dtype']}"
    predictor = "analytic" if entry["predictor"] == "denoise" else entry["predictor"]
    settings = SEDDSettings(steps=entry["steps"], gen_length=1, predictor=predictor)
    found = original_weights(logits, 40, settings, entry["index"])
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-9, rtol=1e-6)
    if entry["predictor"] == "denoise":
        assert found[:, 40].eq(0).all()
    elif entry["dtype"] == "bfloat16" and entry["predictor"] == "analytic" and entry["index"] == 0:
        # Sixteen steps write a mask with a probability of about 1 / 16; bfloat16 has cancellation here.
        assert found[:, 40].tolist() == [1.0625] * 3


LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]


@pytest.mark.parametrize("entry", LOSSES, ids=("31", "32"))
def test_the_masks_and_times_of_the_loss_are_the_originals(entry: dict[str, Any]) -> None:
    clean, noisy = torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    pair = Pair(torch.zeros(0, dtype=torch.long), clean[0])
    corruption = LogLinearCorruption(stratified=False)
    drawn = corruption.draw(pair, 3, torch.Generator().manual_seed(entry["seed"]))
    assert drawn.masked.equal(noisy == 40)
    assert drawn.rate.tolist() == pytest.approx(entry["t"], rel=1e-6)


@pytest.mark.parametrize("entry", LOSSES, ids=("31", "32"))
@torch.no_grad()
def test_every_loss_is_the_original(entry: dict[str, Any]) -> None:
    clean, noisy = torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    nothing = torch.zeros(0, dtype=torch.long)
    queries = [
        Query(row, Pair(nothing, text), masked, masked, sigma=-math.log(1 - 0.999 * entry["t"][row]))
        for row, (text, masked) in enumerate(zip(clean, noisy == 40, strict=True))
    ]
    losses = torch.zeros(noisy.shape, dtype=torch.float64)
    for query, loss in Scorer(loaded(GOLDEN), loss=score_entropy).losses(queries):
        losses[query.item, query.masked] = loss / entry["t"][query.item]
    # The original's sums of float32 numbers of up to 1e3 have errors of about 1e-4.
    torch.testing.assert_close(losses, torch.tensor(entry["loss_per_token"]).double(), atol=1e-3, rtol=1e-4)
    assert losses.sum(-1).tolist() == pytest.approx(entry["loss"], rel=1e-4)


def test_the_likelihood_with_reference_quirks_is_the_original_stream() -> None:
    """A batch of one text is one stratum: the estimator draws the original's time and its masks."""
    for entry in LOSSES:
        answer = entry["x0"][0]
        found = dl.log_likelihood(
            loaded(GOLDEN), [], answer, samples=1, strata=1, seed=entry["seed"], reference_quirks=True
        )
        generator = torch.Generator().manual_seed(entry["seed"])
        t = 0.999 * float(torch.rand(1, generator=generator)) + 1e-3
        masked = torch.rand(1, len(answer), generator=generator)[0] < 0.999 * t
        assert t == pytest.approx(entry["t"][0], rel=1e-6)
        query = Query(0, Pair(torch.zeros(0, dtype=torch.long), torch.tensor(answer)), masked, masked,
                      sigma=-math.log(1 - 0.999 * t))  # fmt: skip
        ((_, loss),) = Scorer(loaded(GOLDEN), loss=score_entropy).losses([query])
        assert -found.value.item() == pytest.approx(float(loss.sum()) / t, rel=1e-5)
