"""DMax's sampler against the authors' `decode_uniform` and its runner, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from tests.sampling.test_llada2_golden import GOLDEN as NETWORK

GOLDEN = NETWORK.parent / "dmax"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = SAMPLING["settings"]
BY_NAME = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])


def golden_of(setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def network_of(setting: dict[str, Any], path: Path = NETWORK) -> Any:
    """LLaDA2's stored network with the head and the embedding that the setting says."""
    model: Any = dl.load(path, mask_token_id=SAMPLING["mask_token_id"], sampler="dmax", check=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(setting["head_scale"])
        model.model.embed_tokens.weight.mul_(setting["embedding_scale"])
        if setting["head_of_mask"] is not None:
            model.lm_head.weight[SAMPLING["mask_token_id"]] = model.lm_head.weight[setting["head_of_mask"]] * 1.2
    model.config.eos_token_id = setting["eos_token_id"]
    return model


def compare(found: dl.DenoisingRun, setting: dict[str, Any]) -> None:
    golden = golden_of(setting)
    assert found.spans == tuple(map(tuple, setting["spans"]))
    # The authors' code fills what follows an end of the text with it; in ours these masks stay.
    written = golden["trajectory"].shape[1]
    assert found.canvases[:, 0, :written].tolist() == golden["trajectory"].tolist()
    for step, (start, stop) in enumerate(found.spans):
        sure = found.confidence[step, 0, start:stop]
        read = sure.isfinite()
        assert int(read.sum()) == setting["active"][step]
        assert found.proposals[step, 0, start:stop][read].tolist() == golden["x0"][step][read].tolist()
        # Each step sees the confidences of the last: with weights that are off by 3e-6 theirs move so far.
        allowed = 1e-4 + 4 * setting["drift_with_weights_3e6"]
        torch.testing.assert_close(sure[read], golden["confidence"][step][read], rtol=0, atol=allowed)


@pytest.mark.parametrize("use_cache", [True, False])
@BY_NAME
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], use_cache: bool) -> None:
    model, given = network_of(setting), {"reference_quirks": True, "use_cache": use_cache}
    compare(dl.denoise(model, [setting["prompt"]], **given, **setting["args"]), setting)


OTHER = {"mask_proposed", "masks_left", "end_in_prompt"}
"""Settings in which the defaults differ: [MASK] is no proposal, no mask is left, an end in the prompt is no end."""


@BY_NAME
def test_without_quirks_the_run_is_the_original(setting: dict[str, Any]) -> None:
    found = dl.denoise(network_of(setting), [setting["prompt"]], **setting["args"])
    if setting["name"] not in OTHER:
        compare(found, setting)
        return
    golden = golden_of(setting)["trajectory"]
    assert found.canvases[:, 0, : golden.shape[1]].tolist() != golden.tolist()
    assert (found.proposals != SAMPLING["mask_token_id"])[found.confidence.isfinite()].all()
    assert found.masks_left.tolist() == [0]


@pytest.mark.parametrize("name", ["plain", "long_embeddings"])
def test_soft_inputs_are_those_of_the_original(name: str) -> None:
    (setting,) = [one for one in SETTINGS if one["name"] == name]
    model, golden, seen = network_of(setting), golden_of(setting), list[Tensor]()
    model.model.soft_inputs.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    run = dl.denoise(model, [setting["prompt"]], reference_quirks=True, **setting["args"])
    later = [step for step in range(run.steps) if run.block_numbers[step]]
    assert len(seen) == len(later)
    stored = [step for step in later if f"inputs{step}" in golden]
    assert len(stored) >= (1 if name == "plain" else 3)
    for step, inputs in zip(later, seen, strict=True):
        if step in stored:
            theirs = golden[f"inputs{step}"]
            # Of probabilities that agree to 1e-4, in units of the embeddings' length.
            size = float(theirs.norm(dim=-1).max())
            torch.testing.assert_close(inputs[-len(theirs) :] / size, theirs / size, rtol=0, atol=1e-3)
