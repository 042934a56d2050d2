"""Every stored trajectory of BD3-LM's sampler, token for token, with and without the prefix cache."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "bd3lm"
SETTINGS = json.loads((GOLDEN / "sampling.json").read_text())["settings"]


def run(setting: dict[str, Any], **options: Any) -> dlm_lens.DenoisingRun:
    given = setting["args"]
    return dlm_lens.denoise(
        loaded(GOLDEN), [[given["bos_token_id"]]], gen_length=given["length"] - 1, seed=setting["seed"],
        block_length=given["block_size"], steps_per_block=given["num_steps"],
        first_hitting=given["first_hitting"], nucleus_p=given["nucleus_p"], **options,
    )  # fmt: skip


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], use_cache: bool) -> None:
    passes: list[int] = []
    model: Any = loaded(GOLDEN)
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = run(setting, use_cache=use_cache, reference_quirks=True)
    handle.remove()
    stored = load_file(GOLDEN / "sampling.safetensors")[setting["name"] + ".trajectory"]
    # The original's canvas grows by a block (an event of its own); ours has the later blocks masked.
    after = [state for state, event in zip(stored, setting["events"], strict=True) if event == "step"]
    assert found.steps == len(after)
    for step, theirs in enumerate(after):
        there = theirs[0] >= 0
        assert found.canvases[step + 1][:, there].equal(theirs[:, there]), step
        assert (found.canvases[step + 1][:, ~there] == 120).all()
    assert found.tokens.tolist() == setting["final"]
    if not use_cache:
        assert len(passes) == setting["forwards"]
