"""Every stored text trajectory of MMaDA's sampler, token for token; images in the prompt; the early stop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "mmada"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
SETTINGS = [setting for setting in SAMPLING["settings"] if not setting["name"].startswith("t2i")]
MASK = SAMPLING["mask_token_id"]


def run(setting: dict[str, Any], **options: Any) -> tuple[dlm_lens.DenoisingRun, dict[str, Tensor]]:
    prefix = setting["name"] + "."
    stored = load_file(GOLDEN / "sampling.safetensors")
    golden = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    arguments = {key: value for key, value in setting["args"].items() if key != "mask_id"}
    # The original's mask covers prompt and answer.
    mask = golden.get("attention_mask")
    return (
        dlm_lens.denoise(loaded(GOLDEN), golden["prompt"], mask, seed=setting["seed"] or 0, **arguments, **options),
        golden,
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
@pytest.mark.parametrize("logits", ["needed", "all"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], logits: str) -> None:
    got, golden = run(setting, reference_quirks=True, logits=logits)
    assert got.canvases.equal(golden["trajectory"])
    assert got.proposals.equal(golden["x0"])
    torch.testing.assert_close(got.confidence, golden["confidence"].float(), atol=1e-5, rtol=1e-5)
    assert got.counts.tolist() == setting["transferred_per_step"]
    assert got.tokens.tolist() == setting["final"]
    assert int(got.masks_left.sum()) == setting["mask_tokens_left"]
    assert (got.steps < setting["args"]["steps"]) == setting["stopped_early"]


PLAIN = [setting for setting in SETTINGS if setting["kind"] == "deterministic"]


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting["name"])
def test_without_noise_and_quirks_the_default_is_the_original(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert got.canvases.equal(golden["trajectory"])
    torch.testing.assert_close(got.confidence, golden["confidence"].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_the_default_leaves_no_mask_but_where_told_and_touches_nothing_else(setting: dict[str, Any]) -> None:
    got, golden = run(setting)
    assert int((got.tokens == MASK).sum()) == setting["mask_tokens_left"]
    assert got.tokens[:, : golden["prompt"].shape[1]].equal(golden["prompt"])


def test_a_mask_may_cover_the_answer_but_not_hide_it() -> None:
    model, ids = tiny("mmada"), torch.tensor([[9, 1, 2], [3, 4, 5]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    short = dlm_lens.denoise(model, ids, mask, gen_length=4)
    whole = dlm_lens.denoise(model, ids, torch.cat([mask, torch.ones(2, 4)], 1), gen_length=4)
    assert short.canvases.equal(whole.canvases)
    assert not short.canvases.equal(dlm_lens.denoise(model, ids, gen_length=4).canvases)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 7\], the prompt ids \[2, 3\]"):
        dlm_lens.denoise(model, ids, torch.cat([mask, torch.zeros(2, 4)], 1), gen_length=4)


def test_the_confidence_is_ranked_in_float64() -> None:
    """Two proposals whose probabilities float32 cannot tell apart: only float64 writes the likelier one first."""

    def sure(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        forced = torch.zeros_like(logits)
        forced[..., 2, 7], forced[..., 3, 8] = 25.0, 26.0
        return forced

    options: dict[str, Any] = {"gen_length": 2, "steps": 2, "block_length": 2, "on_logits": sure}
    assert dlm_lens.denoise(tiny("mmada"), [[1, 2]], **options).step_of[0, 2:].tolist() == [1, 0]
    narrow = dlm_lens.denoise(tiny("mmada"), [[1, 2]], float64_confidence=False, **options)
    assert narrow.step_of[0, 2:].tolist() == [0, 1]


def spell(words: list[list[int]], start: int) -> Any:
    """Logits under which row r writes words[r] behind `start`."""

    def force(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -20.0)
        for row, word in enumerate(words):
            for offset, token in enumerate(word):
                forced[row, start + offset, token] = 20.0
        return forced

    return force


def test_a_row_ends_with_the_block_that_ends_with_the_end_token() -> None:
    words = [[10, 9, 11, 12, 13, 14], [20, 21, 22, 9, 24, 25], [9, 31, 32, 33, 34, 35]]
    options: dict[str, Any] = {"gen_length": 6, "block_length": 2, "steps": 6, "eot_token": 9}
    model = tiny("mmada")
    got = dlm_lens.denoise(model, [[1, 2]] * 3, on_logits=spell(words, 2), **options)
    assert got.tokens[:, 2:].tolist() == [[10, 9, 63, 63, 63, 63], [20, 21, 22, 9, 63, 63], words[2]]
    assert got.masks_left.tolist() == [4, 2, 0]
    assert got.steps == 6
    for row, word in enumerate(words):
        alone = dlm_lens.denoise(model, [[1, 2]], on_logits=spell([word], 2), **options)
        assert alone.tokens[0].equal(got.tokens[row])
        assert alone.steps == [2, 4, 6][row]
    # The original goes on until every row has ended at the same block.
    theirs = dlm_lens.denoise(model, [[1, 2]] * 3, on_logits=spell(words, 2), reference_quirks=True, **options)
    assert theirs.tokens[:, 2:].tolist() == words
    both = [[10, 9, 11, 9, 13, 14], [20, 21, 22, 9, 24, 25]]
    theirs = dlm_lens.denoise(model, [[1, 2]] * 2, on_logits=spell(both, 2), reference_quirks=True, **options)
    assert theirs.tokens[:, 2:].tolist() == [[10, 9, 11, 9, 63, 63], [20, 21, 22, 9, 63, 63]]


def test_in_parallel_decoding_a_row_ends_when_its_block_is_whole() -> None:
    """Its end token is written first here."""
    words = [[10, 9, 11, 12], [20, 21, 22, 9]]

    def force(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        forced = spell(words[: len(logits)], 2)(step, canvas, logits) / 4
        forced[0, 3, 9] = 6.0
        return forced

    options: dict[str, Any] = {"gen_length": 4, "block_length": 2, "threshold": 1.0, "eot_token": 9}
    got = dlm_lens.denoise(tiny("mmada"), [[1, 2]] * 2, on_logits=force, **options)
    assert got.tokens[:, 2:].tolist() == [[10, 9, 63, 63], words[1]]
    assert got.step_of[0, 2:].tolist() == [1, 0, -1, -1]
    alone = dlm_lens.denoise(tiny("mmada"), [[1, 2]], on_logits=force, **options)
    assert (alone.steps, alone.tokens[0].tolist()) == (2, got.tokens[0].tolist())
    # Sure of both, it writes them at the block's first step, and the row ends there.
    sure = dlm_lens.denoise(tiny("mmada"), [[1, 2]] * 2, on_logits=spell(words, 2), **options | {"threshold": 0.9})
    assert (sure.steps, sure.tokens.tolist()) == (2, got.tokens.tolist())


def test_the_last_canvas_of_a_run_that_ended_early_has_the_number_of_its_steps() -> None:
    seen: list[int] = []
    dlm_lens.denoise(
        tiny("mmada"), [[1, 2]], gen_length=6, block_length=2, steps=6, eot_token=9,
        on_logits=spell([[10, 9, 11, 12, 13, 14]], 2), on_canvas=lambda step, _: seen.append(step),
    )  # fmt: skip
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_a_row_is_what_it_is_alone(temperature: float, cfg_scale: float, remasking: str) -> None:
    model, prompts = tiny("mmada"), [[1, 2, 3, 4], [5, 63, 7], [8]]
    options: dict[str, Any] = {
        "gen_length": 8, "block_length": 4, "steps": 4, "temperature": temperature, "cfg_scale": cfg_scale,
        "remasking": remasking, "seed": 5,
    }  # fmt: skip
    together = dlm_lens.denoise(model, prompts, **options)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **options)
        assert together.canvases[:, row, together.attention_mask[row]].equal(alone.canvases[:, 0])


def test_guidance_sees_padding_only_with_the_quirk() -> None:
    model, ids = tiny("mmada"), torch.tensor([[1, 2, 3, 4], [9, 9, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])

    def confidence(prompt: Any, padding: Tensor | None = None, **options: Any) -> Tensor:
        return dlm_lens.denoise(model, prompt, padding, gen_length=6, **options).confidence[0, -1, -6:]

    for quirks in (False, True):
        options: dict[str, Any] = {"cfg_scale": 1.0, "reference_quirks": quirks}
        blind, padded = confidence(ids, **options), confidence(ids, mask, **options)
        alone = confidence([[7, 8]], **options)
        assert (blind - alone).abs().max() > 1e-3
        torch.testing.assert_close(padded, blind if quirks else alone, atol=1e-5, rtol=1e-4)
    # Without guidance the padding is respected, as in the original.
    without = confidence(ids, mask, reference_quirks=True)
    torch.testing.assert_close(without, confidence([[7, 8]], reference_quirks=True), atol=1e-5, rtol=1e-4)
