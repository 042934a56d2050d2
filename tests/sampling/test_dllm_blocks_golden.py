"""Every stored trajectory of dllm's BD3LMSampler, token for token, with and without the prefix cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.sampling.samplers.dllm_blocks import DllmBlockSampler
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "a2d_qwen3_bd3lm"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = SAMPLING["settings"]


def run(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dlm_lens.DenoisingRun:
    model, given = loaded(GOLDEN, mask_token_id=SAMPLING["mask_token_id"]), dict(setting["args"])
    for name, value in {
        "logit_shift": given.pop("right_shift_logits", False), "sampler": "dllm_blocks",
        "pad_token_id": setting["pad_token_id"], "eos_token_id": setting["eos_token_id"],
    }.items():  # fmt: skip
        monkeypatch.setattr(model.config, name, value)
    given |= {"gen_length": given.pop("max_new_tokens"), "block_length": given.pop("block_size")}
    if setting["kind"] == "stochastic_inject":
        numbers = iter(setting["transferred_per_step"])
        monkeypatch.setattr(DllmBlockSampler, "count", lambda *_: torch.tensor(next(numbers)))
        plans, steps = DllmBlockSampler.plans, len(setting["transferred_per_step"])

        def as_drawn(self: DllmBlockSampler, *where: int) -> list[Any]:
            """The steps that the drawn numbers leave: three in the first block, the others in the second."""
            whole = plans(self, *where)
            first, second = ([plan for plan in whole if plan.block == block] for block in (0, 1))
            kept = [*first[:3], *second[: steps - 3]]
            self._stops = [plan.span[1] for plan in kept]
            return kept

        monkeypatch.setattr(DllmBlockSampler, "plans", as_drawn)
    prompts = setting["prompts"]
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), setting["pad_token_id"])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return dlm_lens.denoise(model, ids, mask, seed=setting["seed"] or 0, **given, **options)


def golden_of(setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def compare(found: dlm_lens.DenoisingRun, setting: dict[str, Any]) -> None:
    golden = golden_of(setting)
    # Theirs begins at a whole block: further padding before the longest prompt.
    more = len(setting["final"][0]) - found.tokens.shape[1]
    theirs = golden["trajectory"][..., more:]
    steps = theirs.shape[0] - 1
    assert found.steps == steps
    for step in range(steps + 1):
        there = theirs[step, 0] >= 0
        assert found.canvases[step][:, there].equal(theirs[step][:, there]), step
    assert found.tokens.tolist() == [row[more:] for row in setting["final"]]
    assert found.counts.tolist() == setting["transferred_per_step"]
    confidence = golden["confidence"][..., more:]
    finite = confidence.isfinite()
    assert found.confidence.isfinite().equal(finite)
    # Probabilities of a float32 model; the smallest stored selection margin is 6.2e-4.
    torch.testing.assert_close(found.confidence[finite], confidence[finite], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(
    setting: dict[str, Any], use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(run(setting, monkeypatch, reference_quirks=True, use_cache=use_cache), setting)


def ends_early(setting: dict[str, Any]) -> bool:
    """Whether a row has an end of the text before its last block, where ours stops."""
    width, last = setting["args"]["block_size"], setting["args"]["max_new_tokens"]
    answers = [row[-last:] for row in setting["final"]]
    before = (last - 1) // width * width
    return any(setting["eos_token_id"] in answer[:before] for answer in answers)


PLAIN = [s for s in SETTINGS if s["kind"] == "deterministic" and not sum(s["pads_generated"]) and not ends_early(s)]


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting["name"])
def test_without_noise_and_quirks_the_default_is_the_original(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(run(setting, monkeypatch), setting)


def test_a_row_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = [s for s in SETTINGS if s["name"] == "stop_one_row"]
    found, theirs = run(setting, monkeypatch), run(setting, monkeypatch, reference_quirks=True)
    width, (first, second) = setting["args"]["block_size"], found.tokens
    ended = next(n for n, token in enumerate(first[-12:].tolist()) if token == setting["eos_token_id"]) // width
    stop = len(first) - 12 + (ended + 1) * width
    assert ended < 2
    assert (first[stop:] == SAMPLING["mask_token_id"]).all()
    assert first[:stop].equal(theirs.tokens[0, :stop])
    assert second.equal(theirs.tokens[1])
