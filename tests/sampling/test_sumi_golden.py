"""Every stored trajectory of Sumi's own `generate`, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "sumi"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]
NAMES = {"num_denoising_steps": "steps", "sampler": "remasking", "anchor_eosbos": "delimiter"}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    given = {NAMES.get(name, name): value for name, value in setting["args"].items()}
    prompts, mask = torch.tensor(setting["prompts"]), torch.tensor(setting["attention_mask"])
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = dlm_lens.denoise(
        model, prompts, mask, gen_length=setting["max_new_tokens"], canvas_length=setting["canvas_length"],
        seed=setting["seed"], reference_quirks=True, **given,
    )  # fmt: skip
    handle.remove()
    stored = load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"]
    content = found.attention_mask
    assert found.canvases.masked_fill(~content, 0).equal(stored.masked_fill(~content, 0))
    assert len(passes) == found.steps == setting["passes"]
    # The original cuts a row at the first EOS after the prompt; a run's answer ends there, or after gen_length.
    for row, sequence in enumerate(setting["sequences"]):
        answer = found.tokens[row, 4 : 4 + setting["max_new_tokens"]].tolist()
        answer = answer[: answer.index(64)] if 64 in answer else answer
        assert sequence[4 : 4 + len(answer)] == answer
