"""Every stored trajectory of SDAR's generate.py, token for token, with and without the prefix cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "sdar"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = [setting for setting in SAMPLING["settings"] if setting["kind"] != "defect"]
DRAWN = [setting for setting in SETTINGS if not setting["multinomial_replaced_by_argmax"]]
NAMES = {
    "denoising_steps": "steps_per_block", "remasking_strategy": "remasking", "confidence_threshold": "threshold",
    "stopping_criteria_idx": "stop_tokens",
}  # fmt: skip


def likeliest(probabilities: Tensor, count: int, generator: Any = None) -> Tensor:
    """What the golden has in place of `torch.multinomial` where its setting says so."""
    assert count == 1
    return probabilities.argmax(-1, keepdim=True)


def run(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    arguments = {NAMES.get(name, name): value for name, value in setting["args"].items()}
    if setting["multinomial_replaced_by_argmax"]:
        monkeypatch.setattr(torch, "multinomial", likeliest)
    found = dlm_lens.denoise(loaded(GOLDEN), golden["prompt"], seed=setting["seed"] or 0, **arguments | options)
    return found, golden


@pytest.mark.filterwarnings("ignore:block_length is 8")
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(
    setting: dict[str, Any], use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting in DRAWN and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    found, golden = run(setting, monkeypatch, reference_quirks=True, use_cache=use_cache)
    assert found.canvases.equal(golden["trajectory"])
    assert found.counts.tolist() == setting["transferred_per_step"]
    assert found.tokens.tolist() == setting["final"]
    assert found.masks_left.tolist() == [setting["mask_tokens_left"]]
    first = setting["block_and_step"][0][0]
    assert [first + block for block in found.blocks] == [block for block, _ in setting["block_and_step"]]
    finite = golden["confidence"].isfinite()
    assert found.confidence.isfinite().equal(finite)
    # Probabilities of a float32 model; the smallest stored selection margin is 5.9e-4.
    torch.testing.assert_close(found.confidence[finite], golden["confidence"][finite], atol=1e-5, rtol=1e-5)
    assert found.proposals[finite].equal(golden["x0"][finite])


def whole(setting: dict[str, Any]) -> bool:
    """Whether prompt and answer fill whole blocks, and nothing is filtered but the likeliest token."""
    length = load_file(GOLDEN / "sampling.safetensors")[f"{setting['name']}.prompt"].shape[1]
    plain = "temperature" not in setting["args"]
    return plain and (length + setting["args"]["gen_length"]) % setting["args"]["block_length"] == 0


@pytest.mark.filterwarnings("ignore:block_length is 8")
@pytest.mark.parametrize("setting", [one for one in SETTINGS if whole(one)], ids=lambda setting: setting["name"])
def test_without_noise_and_quirks_the_default_is_the_original(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if "stopping_criteria_idx" in setting["args"] else {"stop_tokens": ()}
    found, golden = run(setting, monkeypatch, temperature=0.0, **options)
    assert found.canvases.equal(golden["trajectory"])
    assert found.counts.tolist() == setting["transferred_per_step"]


def test_nothing_but_masks_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting in which the original writes over its prompt."""
    (setting,) = [setting for setting in SAMPLING["settings"] if setting["name"] == "overwrite"]
    assert setting["positions_overwritten_that_were_no_mask"] == 1
    for quirks in (True, False):
        found, golden = run(setting, monkeypatch, reference_quirks=quirks)
        assert found.tokens[:, :3].equal(golden["prompt"])
        assert found.masks_left.tolist() == [0]
        assert (found.counts[0].tolist(), setting["transferred_per_step"][0]) == ([1], [2])
