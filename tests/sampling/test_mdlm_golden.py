"""Every stored trajectory of MDLM's sampler, token for token, and its loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import LogLinearCorruption
from dlm_lens.sampling.likelihood.scoring import Query, Scorer
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "mdlm"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]


def run(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dlm_lens.DenoisingRun:
    model, given = loaded(GOLDEN), setting["args"]
    monkeypatch.setattr(model.config, "time_conditioning", given["time_conditioning"])
    prompts = torch.zeros(given["batch"], 0, dtype=torch.long)
    names = {"steps": "steps", "eps": "eps", "noise_removal": "noise_removal", "length": "gen_length"}
    settings = {ours: given[theirs] for theirs, ours in names.items()} | {"predictor": given["sampler"]}
    return dlm_lens.denoise(model, prompts, seed=setting["seed"], **settings, **options)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = run(setting, monkeypatch, reference_quirks=True)
    handle.remove()
    assert len(passes) == setting["forwards"]
    stored = load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"]
    assert found.canvases.equal(stored)
    assert found.tokens.tolist() == setting["final"]
    assert found.counts.tolist() == setting["transferred_per_step"]


LOSSES = json.loads((GOLDEN / "loss.json").read_text())["entries"]


@pytest.mark.parametrize("entry", LOSSES, ids=("plain", "conditioned"))
def test_the_masks_and_weights_of_the_loss_are_the_originals(entry: dict[str, Any]) -> None:
    clean, noisy = torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    pair = Pair(torch.zeros(0, dtype=torch.long), clean[0])
    drawn = LogLinearCorruption().draw(pair, 3, torch.Generator().manual_seed(entry["seed"]))
    assert drawn.masked.equal(noisy == 120)
    assert drawn.rate.tolist() == pytest.approx(entry["t"], rel=1e-6)


@pytest.mark.parametrize("entry", LOSSES, ids=("plain", "conditioned"))
@torch.no_grad()
def test_every_loss_is_the_original(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, conditioned = loaded(GOLDEN), entry["time_conditioning"]
    monkeypatch.setattr(model.config, "time_conditioning", conditioned)
    clean, noisy = torch.tensor(entry["x0"]), torch.tensor(entry["xt"])
    nothing = torch.zeros(0, dtype=torch.long)
    queries = [
        Query(
            row,
            Pair(nothing, text),
            masked,
            masked,
            sigma=-math.log(1 - 0.999 * entry["t"][row]) if conditioned else None,
        )
        for row, (text, masked) in enumerate(zip(clean, noisy == 120, strict=True))
    ]
    losses = torch.zeros(noisy.shape, dtype=torch.float64)
    for query, loss in Scorer(model).losses(queries):
        losses[query.item, query.masked] = loss / entry["t"][query.item]
    # Relative to the largest: 5e-7 from float64 in the original's own float32.
    torch.testing.assert_close(losses, torch.tensor(entry["loss_per_token"]).double(), atol=1e-4, rtol=1e-5)
    assert float(losses.mean()) == pytest.approx(entry["mean"], rel=1e-5)
