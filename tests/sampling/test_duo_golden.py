"""Every stored trajectory of Duo's own `generate_samples`, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "duo"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    given = {{"p_nucleus": "top_p"}.get(name, name): value for name, value in setting["args"].items()}
    if given.pop("predictor", "ancestral") == "psi":
        monkeypatch.setattr(model.config, "sampler", "duo_psi")
        given |= given.pop("psi")
    prompts = torch.zeros(setting["batch"], 0, dtype=torch.long)
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = dlm_lens.denoise(model, prompts, gen_length=12, seed=setting["seed"], reference_quirks=True, **given)
    handle.remove()
    stored = load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"]
    assert found.canvases.equal(stored)
    assert len(passes) == found.steps == setting["forwards"]
    assert found.tokens.tolist() == setting["final"]
    changed = found.canvases[1:] != found.canvases[:-1]
    assert changed.sum(-1).tolist() == setting["changed_per_step"]
    # The quirk is the stream of the batch: without it every row has its own.
    plain = dlm_lens.denoise(model, prompts, gen_length=12, seed=setting["seed"], **given)
    assert plain.canvases[0].equal(stored[0]) == (setting["batch"] == 1)
