"""Every stored trajectory of the original sampler, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "llada"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = SAMPLING["settings"]


def run(setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, torch.Tensor]]:
    model = loaded(GOLDEN, eos_token_id=SAMPLING["eos_token_id"], eot_token_id=SAMPLING["eot_token_id"])
    stored = load_file(GOLDEN / "sampling.safetensors")
    prefix = setting["name"] + "."
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    arguments = {key: value for key, value in setting["args"].items() if key != "mask_id"}
    result = dlm_lens.denoise(
        model,
        golden["prompt"],
        golden.get("attention_mask"),
        seed=setting["seed"] or 0,
        **arguments,
        **options,
    )
    return result, golden


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
@pytest.mark.parametrize("logits", ["needed", "all"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], logits: str) -> None:
    got, golden = run(setting, reference_quirks=True, logits=logits)
    assert got.canvases.equal(golden["trajectory"])
    assert got.proposals.equal(golden["x0"])
    # Probabilities of a float32 model; the smallest stored selection margin is 9e-4.
    torch.testing.assert_close(got.confidence, golden["confidence"], atol=1e-5, rtol=1e-5)
    assert got.counts.tolist() == setting["transferred_per_step"]
    assert got.tokens.tolist() == setting["final"]
    assert int(got.masks_left.sum()) == setting["mask_tokens_left"]


PLAIN = [s for s in SETTINGS if s["kind"] == "deterministic" and s["mask_tokens_left"] == 0]


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting["name"])
def test_without_noise_and_quirks_the_default_is_the_original(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert got.canvases.equal(golden["trajectory"])
    torch.testing.assert_close(got.confidence, golden["confidence"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s["mask_tokens_left"]], ids=lambda setting: setting["name"]
)
def test_the_default_leaves_no_mask_where_the_original_does(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert int(got.masks_left.sum()) == 0
    assert not (got.tokens == SAMPLING["mask_token_id"]).any()
    content = golden["prompt"] != SAMPLING["mask_token_id"]
    assert got.tokens[:, : golden["prompt"].shape[1]][content].equal(golden["prompt"][content])


def test_postponed_ends_stay_postponed_with_noise_by_default() -> None:
    """In the original, the EOS switch is lost at temperature > 0; the default keeps it."""
    setting = next(s for s in SETTINGS if s["name"] == "temperature_0.6_conf_eos_eot_inf")
    got, _ = run(setting | {"args": setting["args"] | {"temperature": 1.5, "gen_length": 40, "steps": 40,
                                                       "block_length": 40}})  # fmt: skip
    eligible = got.confidence > -torch.inf
    ends = torch.isin(got.proposals, torch.tensor([SAMPLING["eos_token_id"], SAMPLING["eot_token_id"]]))
    assert (eligible & ends).any()
    assert (got.confidence[eligible & ends] == 0).all()
    assert (got.confidence[eligible & ~ends] > 0).all()
