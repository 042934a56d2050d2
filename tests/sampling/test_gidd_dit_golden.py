"""Every stored trajectory of GIDD's own sampler and self-correction, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens as dl
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "gidd_dit"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]
NAMES = {"num_inference_steps": "steps", "temperature": "temperature", "t0": "time", "early_stopping": "stops"}
NAMES |= {"early_stopping_patience": "patience"}


def settings_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The settings of `denoise` for a stored run of the original."""
    given = {name: entry[name] for name in ("gen_length", "steps", "min_p", "eps", "seed")}
    return given | {"correction_" + NAMES[name]: value for name, value in (entry["correction"] or {}).items()}


@pytest.mark.parametrize("entry", SETTINGS, ids=lambda entry: entry["name"])
def test_reference_quirks_reproduce_the_original(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = loaded(GOLDEN)
    monkeypatch.setattr(model.config, "p_uniform", entry["p_uniform"])
    times: list[float] = []
    handle = model.model.sigma_map.register_forward_pre_hook(lambda _m, args: times.append(float(args[0][0])))
    found = dl.denoise(model, [[]] * entry["rows"], reference_quirks=True, **settings_of(entry))
    handle.remove()
    stored = load_file(GOLDEN / "sampling.safetensors")[entry["name"]]
    assert found.canvases.equal(stored)
    assert len(times) == found.steps == entry["passes"]
    # `linspace` in float32 differs by an ulp between processors.
    torch.testing.assert_close(torch.tensor(times), torch.tensor(entry["times"]), atol=1e-7, rtol=0)
    assert bool((stored == 39).any()) == bool(found.open.any())
