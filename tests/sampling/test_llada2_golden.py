"""LLaDA2's samplers against dllm's, token for token, with and without the prefix cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.samplers.sdar import BlockDraws
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "llada2"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = SAMPLING["settings"]
ALGORITHMS = {"LLaDA2Sampler": "llada2", "LLaDA21Sampler": "llada2_editing"}


def golden_of(setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def run(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dl.DenoisingRun:
    model, given = loaded(GOLDEN, mask_token_id=SAMPLING["mask_token_id"]), dict(setting["args"])
    monkeypatch.setattr(model.config, "sampler", ALGORITHMS[setting["sampler"]])
    monkeypatch.setattr(model.config, "eos_token_id", setting["eos_token_id"])
    defaults = dict(next(f for f in dl.families() if f.name == "llada2").samplers[model.config.sampler])
    monkeypatch.setattr(model, "sampler_defaults", defaults)
    given |= {"gen_length": given.pop("max_new_tokens"), "block_length": given.pop("block_size")}
    if setting["kind"] == "stochastic_inject":
        samples = iter(golden_of(setting)["x0"])

        def drawn(noise: BlockDraws, probabilities: Tensor, evaluated: Tensor, eligible: Tensor) -> Tensor:
            return next(samples)[evaluated]

        monkeypatch.setattr(BlockDraws, "tokens", drawn)
    return dl.denoise(model, setting["prompts"], seed=setting["seed"] or 0, **given, **options)


def compare(found: dl.DenoisingRun, setting: dict[str, Any]) -> None:
    golden = golden_of(setting)
    assert found.steps == len(golden["trajectory"]) - 1
    for step, canvas in enumerate(golden["trajectory"]):
        assert found.canvases[step].equal(canvas), step
    assert found.tokens.tolist() == setting["final"]
    assert found.counts.tolist() == setting["unmasked_per_step"]
    assert found.revised.sum(-1).tolist() == setting["edited_per_step"]
    assert found.masks_left.tolist() == setting["mask_tokens_left"]
    # Ours looks at the positions that may be written, theirs at the whole block.
    read = found.confidence.isfinite()
    assert (golden["confidence"].isfinite() & ~read & found.masked[:-1] & found.in_block).sum() == 0
    assert found.proposals[read].equal(golden["x0"][read])
    # Probabilities of a float32 model; the smallest stored distance to a threshold is 5.5e-4.
    torch.testing.assert_close(found.confidence[read], golden["confidence"][read], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(
    setting: dict[str, Any], use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(run(setting, monkeypatch, reference_quirks=True, use_cache=use_cache), setting)


def to_the_end(tokens: list[int], end: int) -> list[int]:
    """The tokens before the first end of the text."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


PLAIN = [s for s in SETTINGS if s["kind"] == "deterministic" and s["name"] != "eos_early_stop"]


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting["name"])
def test_without_quirks_the_text_is_the_original(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # [MASK] is the likeliest token nowhere in these, or ours would differ, which never proposes it.
    found, length = run(setting, monkeypatch), setting["args"]["max_new_tokens"]
    for row, prompt in enumerate(setting["prompts"]):
        ours, theirs = (
            tokens[len(prompt) :][:length] for tokens in (found.tokens[row].tolist(), setting["final"][row])
        )
        assert to_the_end(ours, setting["eos_token_id"]) == to_the_end(theirs, setting["eos_token_id"])
    if not any(setting["eos_token_id"] in row for row in setting["final"]):
        compare(found, setting)


@pytest.mark.parametrize("early", [True, False])
def test_ends_as_the_models_own_generate(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` of the model file stops inside the block (stored), and without the flag after the block."""
    (setting,) = [s for s in SETTINGS if s["name"] == "eos_early_stop"]
    plain = {**setting, "args": {**setting["args"], "eos_early_stop": early}}
    found, (theirs,) = run(plain, monkeypatch), setting["result_of_model_generate"]
    start = len(setting["prompts"][0])
    assert to_the_end(found.tokens[0, start:].tolist(), setting["eos_token_id"]) == theirs[:-1]
    # The token before the end is the last of its block that is written, so that both are left at the same step.
    assert found.masked[-1, 0, start:].tolist() == [False] * 8 + [True] * 4
