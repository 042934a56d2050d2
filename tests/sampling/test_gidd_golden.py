"""Every stored trajectory of GIDD's own `generate`, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden"
SETTINGS = [
    pytest.param(name, setting, id=f"{name}-{setting['name']}")
    for name in ("gidd", "gidd_mask", "gidd_hybrid")
    for setting in json.loads((GOLDEN / name / "sampling.json").read_text())["settings"]
]
NAMES = {
    "steps": "steps_per_block",
    "sampling_method": "remasking",
    "max_length": "gen_length",
    "noise_schedule": "schedule",
}
EOS, PAD = 1, 2


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_reference_quirks_reproduce_the_original(name: str, setting: dict[str, Any]) -> None:
    model: Any = loaded(GOLDEN / name)
    given = {NAMES.get(key, key): value for key, value in setting["args"].items()}
    run = dlm_lens.denoise(
        model,
        torch.tensor(setting["prompts"]),
        canvas_length=32,
        seed=setting["seed"],
        reference_quirks=True,
        **given,
    )
    # The original makes no pass over a block that has not changed.
    seen = [
        canvas
        for step, canvas in enumerate(run.canvases[:-1])
        if not step or run.blocks[step] != run.blocks[step - 1] or not canvas.equal(run.canvases[step - 1])
    ]
    stored = load_file(GOLDEN / name / "sampling.safetensors")[setting["name"] + ".trajectory"]
    assert torch.stack(seen).equal(stored)
    # The original writes padding from the first end of the text on.
    answers = run.tokens[:, : 3 + given["gen_length"]]
    over = (answers == EOS).cumsum(-1) > 0
    assert answers.masked_fill(over, PAD).tolist() == setting["sequences"]
