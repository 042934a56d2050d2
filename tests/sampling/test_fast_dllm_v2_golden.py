"""Every stored trajectory of Fast-dLLM v2's `generate`, token for token, with and without the caches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.sampling.samplers.sdar import BlockDraws
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "fast_dllm_v2"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
MASK = SAMPLING["mask_token_id"]
NAMES = {"max_new_tokens": "gen_length", "block_size": "block_length", "small_block_size": "sub_block_length"}


def golden_of(setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


def settings_of(setting: dict[str, Any]) -> dict[str, Any]:
    given = {NAMES.get(name, name): value for name, value in setting["args"].items()}
    del given["stop_token"]
    return given


def model_of(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    model = loaded(GOLDEN, mask_token_id=MASK)
    monkeypatch.setattr(model.config, "eos_token_id", setting["args"]["stop_token"])
    return model


def drawn_as(stored: list[Tensor]) -> Callable[..., Tensor]:
    """`tokens` of the noise, as the original drew them."""
    steps = iter(stored)

    def tokens(self: Any, probabilities: Tensor, evaluated: Tensor, eligible: Tensor) -> Tensor:
        ours = next(steps)
        width = min(ours.shape[1], evaluated.shape[1])
        found = torch.zeros_like(evaluated, dtype=torch.long)
        found[:, :width] = ours[:, :width].clamp(min=0)
        return found[evaluated]

    return tokens


def forwards(setting: dict[str, Any]) -> list[int]:
    """The events that ran a forward pass and wrote something."""
    return [index for index, event in enumerate(setting["events"]) if event in ("block", "sub", "next")]


def compare(found: dlm_lens.DenoisingRun, setting: dict[str, Any]) -> None:
    golden, events = golden_of(setting), forwards(setting)
    assert found.steps == len(events)
    final = torch.tensor(setting["final"])
    # The original cuts the text after its end; what the last step wrote after that stays on our canvas.
    assert found.tokens[:, : final.shape[1]].equal(final)
    for step, event in enumerate(events):
        theirs = golden["trajectory"][event]
        width = min(theirs.shape[1], found.tokens.shape[1])
        there = theirs[0, :width] >= 0
        assert found.canvases[step + 1][:, :width][:, there].equal(theirs[:, :width][:, there]), step
        if setting["events"][event] == "next":
            assert found.unmasked[step].sum() == 1
            continue
        ranked = golden["confidence"][event][:, :width]
        finite = ranked.isfinite()
        assert found.confidence[step][:, :width].isfinite().equal(finite), step
        assert found.proposals[step][:, :width][finite].equal(golden["x0"][event][:, :width][finite])
        # Probabilities of a float32 model; the smallest stored selection margin is 8.2e-4.
        torch.testing.assert_close(found.confidence[step][:, :width][finite], ranked[finite], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("setting", SAMPLING["settings"], ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(
    setting: dict[str, Any], use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting["args"]["use_block_cache"] and not use_cache:
        pytest.skip("the cache within a block needs the one of finished blocks")
    golden, model = golden_of(setting), model_of(setting, monkeypatch)
    if setting["kind"] == "stochastic_inject":
        monkeypatch.setattr(BlockDraws, "tokens", drawn_as([golden["x0"][event] for event in forwards(setting)]))
    found = dlm_lens.denoise(
        model, golden["prompt"], seed=setting["seed"] or 0, reference_quirks=True, use_cache=use_cache,
        **settings_of(setting),
    )  # fmt: skip
    compare(found, setting)


@pytest.mark.parametrize("setting", SAMPLING["batch_sample"], ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_batch(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("block_size", "small_block_size", "max_new_tokens", "threshold")
    args = {name: setting[name] for name in names}
    model = model_of({"args": setting}, monkeypatch)
    found = dlm_lens.denoise(
        model, setting["prompts"], reference_quirks=True, **settings_of({"args": {**args, "stop_token": None}})
    )
    for row, (prompt, theirs) in enumerate(zip(setting["prompts"], setting["rows"], strict=True)):
        ours = found.tokens[row, int(found.padding[row]) :]
        answer, stop = theirs[len(prompt) :], setting["stop_token"]
        length = len(prompt) + (answer.index(stop) + 1 if stop in answer else len(answer))
        assert ours[:length].tolist() == theirs[:length]
        if stop not in answer:
            assert (ours[length:] == MASK).all()


# Of NVlabs/Fast-dLLM, v2/generation_functions.py, `batch_sample`, on golden/fast_dllm_v2: blocks of 8, sub-blocks
# of 4, threshold 0.3; the lengths of the prompts, max_new_tokens, and each row from its last prompt token on.
TEXTS = [
    [71, 54, 107, 45, 6, 50, 92, 73, 68, 4, 119, 90, 11, 72, 38, 128, 123],
    [40, 27, 89, 129, 127, 112, 39, 64, 77, 71, 129, 83, 26, 24, 54, 5, 94],
    [30, 5, 117, 54, 25, 49, 86, 113, 114, 27, 100, 102, 69, 82, 36, 0, 132],
]
UNEQUAL_PROMPTS: list[tuple[list[int], int, list[list[int]]]] = [
    (
        [17, 3],
        16,
        [
            [157, 37, 57, 122, 102, 67, 125, 71, 67, 130, 71, 71, 71, 71, 71, 67, 36],
            [
                *[89, 71, 112, 59, 109, 120, 38, 41, 130, 79, 69, 68, 127, 52, 130, 37],
                *[79, 27, 67, 52, 27, 72, 134, 118, 41, 27, 29, 65, 27, 158, 74],
            ],
        ],
    ),
    (
        [3, 16, 17],
        16,
        [
            [107, 71, 27, 120, 27, 120, 6, 124, *[83] * 23],
            [5, 67, 37, 129, 90, 128, 67, 65, 55, 102, 61, 153, 67, 124, 124, 65, 80, 122],
            [102, 11, 66, 11, 122, 42, 37, 72, 27, 117, 72, 37, 72, 27, 28, 42, 159],
        ],
    ),
    ([17, 3], 4, [[157], [89, 71, 112, 59, 109, 120, 38, 41, 130, 79, 69, 68, 127, 52, 130]]),
    ([12, 8, 2], 4, [[90], [64, 62], [5, 97, 67, 156, 156, 109, 42, 37]]),
]


@pytest.mark.parametrize(("lengths", "more", "rows"), UNEQUAL_PROMPTS)
def test_reference_quirks_of_unequal_prompts_are_the_original(
    lengths: list[int], more: int, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompt's last token is written over where it is the first of its block, so that a prompt of one
    token less gets its first token; and rows of short prompts are decoded though no whole block is requested."""
    model = model_of({"args": {"stop_token": 142}}, monkeypatch)
    prompts = [text[:length] for text, length in zip(TEXTS, lengths, strict=False)]
    settings: dict[str, Any] = {"gen_length": more, "block_length": 8, "sub_block_length": 4, "threshold": 0.3}
    run = dlm_lens.denoise(model, prompts, reference_quirks=True, **settings)
    for row, (prompt, theirs) in enumerate(zip(prompts, rows, strict=True)):
        ours = run.tokens[row, int(run.padding[row]) :].tolist()
        assert ours[: len(prompt) - 1] == prompt[:-1]
        assert ours[len(prompt) - 1 :][: len(theirs)] == theirs
        assert set(ours[len(prompt) - 1 + len(theirs) :]) <= {MASK}
    default = dlm_lens.denoise(model, prompts, **settings)
    assert all(
        default.tokens[row, int(default.padding[row]) :][: len(prompt)].tolist() == prompt
        for row, prompt in enumerate(prompts)
    )


def comparable(setting: dict[str, Any]) -> bool:
    """Whether the original has no defect there: everything but the prompt that it drops."""
    return setting["kind"] == "deterministic" and setting["name"] != "prompt_equals_block"


@pytest.mark.parametrize("setting", [s for s in SAMPLING["settings"] if comparable(s)], ids=lambda s: s["name"])
def test_without_defects_the_default_is_the_original(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, model, given = golden_of(setting), model_of(setting, monkeypatch), settings_of(setting)
    final = setting["final"][0]
    # Blocks that the original decodes whole: as many tokens, without the one after the last block.
    length = golden["trajectory"].shape[2] - golden["prompt"].shape[1]
    found = dlm_lens.denoise(model, golden["prompt"], **given | {"gen_length": length})
    assert found.tokens.shape[1] == golden["prompt"].shape[1] + length
    assert found.tokens[0, : len(final)].tolist() == final
