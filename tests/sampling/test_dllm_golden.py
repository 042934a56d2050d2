"""Every stored trajectory of dllm's MDLMSampler, token for token, on A2D-Qwen3."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens
from dlm_lens.sampling.samplers.dllm import DllmSampler, transfers
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "a2d_qwen3"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
IDS = {name: SAMPLING[name] for name in ("mask_token_id", "eos_token_id")}
SETTINGS = SAMPLING["settings"]


def run(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dlm_lens.DenoisingRun:
    model, given = loaded(GOLDEN, **IDS), dict(setting["args"])
    prompts = [ids or [SAMPLING["bos_token_id"]] for ids in setting["prompts"]]
    longest = max(map(len, prompts))
    monkeypatch.setattr(model.config, "logit_shift", given.pop("right_shift_logits", False))
    block, length = given.pop("block_size"), given.pop("max_length", None)
    if setting["function"] == "infill":
        # None is no value for denoise; a block of any size beyond the canvas is one block too.
        given |= {"gen_length": 0, "block_length": block or 1000}
    else:
        given |= {"gen_length": given.pop("max_new_tokens") or length - longest, "block_length": block}
    if setting["kind"] == "stochastic_inject":
        numbers = iter(setting["transferred_per_step"])
        monkeypatch.setattr(DllmSampler, "count", lambda *_: torch.tensor(next(numbers)))
        plans = DllmSampler.plans

        def as_drawn(self: DllmSampler, *where: int) -> list[Any]:
            """The steps that the drawn numbers leave: three in each block here."""
            whole = plans(self, *where)
            return [plan for block in (0, 1) for plan in [p for p in whole if p.block == block][:3]]

        monkeypatch.setattr(DllmSampler, "plans", as_drawn)
    given["schedule"] = given.pop("scheduler", "linear")
    ids = torch.full((len(prompts), longest), SAMPLING["eos_token_id"])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return dlm_lens.denoise(model, ids, mask, seed=setting["seed"] or 0, **given, **options)


def moved(values: Tensor, found: dlm_lens.DenoisingRun, fill: float) -> Tensor:
    """Ours, padded on the left, as theirs, padded on the right."""
    whole = torch.full_like(values, fill)
    for row, content in enumerate(found.attention_mask):
        whole[:, row, : int(content.sum())] = values[:, row, content]
    return whole


def golden_of(setting: dict[str, Any]) -> dict[str, Tensor]:
    stored, prefix = load_file(GOLDEN / "sampling.safetensors"), setting["name"] + "."
    return {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, golden = run(setting, monkeypatch, reference_quirks=True), golden_of(setting)
    assert moved(found.canvases, found, SAMPLING["eos_token_id"]).equal(golden["trajectory"])
    assert found.counts.tolist() == setting["transferred_per_step"]
    assert found.masks_left.tolist() == setting["mask_tokens_left"]
    confidence = moved(found.confidence, found, -torch.inf)
    finite = golden["confidence"].isfinite()
    assert confidence.isfinite().equal(finite)
    # Probabilities of a float32 model; the smallest stored selection margin is 6.7e-4 (4.6e-5 of random numbers).
    torch.testing.assert_close(confidence[finite], golden["confidence"][finite], atol=1e-5, rtol=1e-5)


PLAIN = [s for s in SETTINGS if s["kind"] == "deterministic" and "begin_suppress" not in s["name"]
         and not sum(s["mask_tokens_left"])]  # fmt: skip


@pytest.mark.parametrize("setting", PLAIN, ids=lambda setting: setting["name"])
def test_without_noise_and_quirks_the_default_is_the_original(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(setting, monkeypatch)
    assert moved(found.canvases, found, SAMPLING["eos_token_id"]).equal(golden_of(setting)["trajectory"])


def test_the_default_fills_masks_of_the_prompt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = [s for s in SETTINGS if sum(s["mask_tokens_left"])]
    found = run(setting, monkeypatch)
    assert int(found.masks_left.sum()) == 0


def test_tokens_to_suppress_at_first_are_proposed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = [s for s in SETTINGS if s["name"] == "begin_suppress"]

    def proposed(*banned: int) -> list[set[int]]:
        """What is proposed for masked positions, step by step."""
        given = {**setting["args"], "steps": 8, "begin_suppress_tokens": list(banned)}
        found = run(setting | {"args": given}, monkeypatch)
        return [{*found.proposals[step][found.masked[step]].tolist()} for step in range(found.steps)]

    first, *_ = proposed()
    banned = next(token for token in first if any(token in step for step in proposed(token)[1:]))
    found = proposed(banned)
    assert banned not in found[0]
    assert any(banned in step for step in found[1:])


def by_hand(masks: int, steps: int) -> list[int]:
    """Numbers of the linear schedule, in numpy's float32: alpha(t) = 1 - t."""
    found, one = [], np.float32(1)
    for left in range(steps, 0, -1):
        now, then = (one - (one - np.float32(step / steps)) for step in (left, left - 1))
        found.append(int(np.rint(np.float64(masks - sum(found)) * np.float64(one - then / now))))
    return [number for number in found if number]


def test_numbers_of_tokens_by_hand() -> None:
    assert transfers(12, 5) == (2, 2, 3, 2, 3)
    assert transfers(5, 9) == (1,) * 5
    for masks in range(1, 33):
        for steps in range(1, 33):
            assert list(transfers(masks, steps)) == by_hand(masks, steps)
            assert sum(transfers(masks, steps, "cosine")) == masks
    # The cosine schedule begins slowly.
    assert transfers(32, 8, "cosine")[0] < 2 < 4 == transfers(32, 8)[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8}, {"remasking": "random"}, {"stochastic_transfer": True}, {"cfg_scale": 1.0}],
)
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model, prompts = tiny("a2d_qwen3", head_dim=8), [[1, 2, 3, 4], [5, 63, 7], [8]]
    given = {"gen_length": 10, "block_length": 4, "steps": 6, "seed": 5, **options}
    together = dlm_lens.denoise(model, prompts, **given)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **given)
        kept = together.attention_mask[row]
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])


def test_infilling_cuts_each_row_s_own_positions_into_blocks() -> None:
    model, mask = tiny("a2d_qwen3", head_dim=8), 63
    prompts = [[1, mask, 3, mask, mask, 6, 7, mask], [mask, 4, mask, mask, 8]]
    given = {"gen_length": 0, "block_length": 4, "steps": 4, "temperature": 0.5, "seed": 2}
    together = dlm_lens.denoise(model, prompts, **given)
    assert together.masks_left.tolist() == [0, 0]
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **given)
        content = together.attention_mask[row]
        assert together.tokens[row, content].equal(alone.tokens[0])
        when = together.unmasked[:, row, content].byte().argmax(0)
        masked = together.masked[0, row, content]
        # Every mask of the first four positions is written before any of the others.
        later = when[4:][masked[4:]].tolist()
        assert all(int(when[:4][masked[:4]].max()) < step for step in later)
        assert later or row == 1


def test_drawn_numbers_are_binomial() -> None:
    model = tiny("a2d_qwen3", head_dim=8)
    found = dlm_lens.denoise(
        model,
        [[1, 2]] * 400,
        gen_length=8,
        block_length=8,
        steps=4,
        stochastic_transfer=True,
        seed=list(range(400)),
    )
    first = found.counts[0].double()
    # Eight masks, each with probability 1/4: mean 2, variance 1.5; standard errors 0.061 and 0.11.
    assert float(first.mean()) == pytest.approx(2.0, abs=0.25)
    assert float(first.var()) == pytest.approx(1.5, abs=0.45)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "quadratic"}, "schedule is 'quadratic'; it must be one of linear, cosine"),
        ({"remasking": "low_confidance"}, r"none of dllm's \(did you mean 'low_confidence'\?\): low"),
        ({"remasking": "origin"}, "remasking 'origin' is none of dllm's: low_confidence, random"),
        ({"block_length": 0}, "block_length is 0; it must be at least 1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"alg_temp": 1.0}, "the dllm sampler has no setting 'alg_temp'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.denoise(tiny("a2d_qwen3", head_dim=8), [[1, 2]], **{"gen_length": 4, **options})
