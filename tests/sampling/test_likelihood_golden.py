"""Every stored likelihood of the original evaluation code, with its random masks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import CountCorruption, RateCorruption
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden"
IDS = {"a2d_qwen3": {"mask_token_id": 155, "eos_token_id": 142}}
METHODS = {"chain_rule": {}, "ar_ftb": {"order": "left_to_right"}, "ar_btf": {"order": "right_to_left"}, "mc": {}}


def entries(*families: str) -> list[Any]:
    return [
        pytest.param(family, entry, id=f"{family}-{entry['name']}")
        for family in families
        for entry in json.loads((GOLDEN / family / "likelihood.json").read_text())["entries"]
    ]


def run(family: str, entry: dict[str, Any], **options: Any) -> dlm_lens.LogLikelihood:
    model = loaded(GOLDEN / family, **IDS.get(family, {}))
    kind = entry.get("nll_type", "mc")
    settings: dict[str, Any] = dict(METHODS[kind])
    if kind == "mc":
        settings |= {"samples": entry["mc_num"], "seed": entry["seed"]}
        if entry.get("log_type") == "union":
            settings["scope"] = "both"
    scale = entry.get("cfg_scale", entry.get("cfg", 0.0))
    prompt, answer = entry.get("prompt", entry.get("prefix")), entry.get("answer", entry.get("target"))
    method = "mc" if kind == "mc" else "chain_rule"
    return dlm_lens.log_likelihood(model, prompt, answer, method, cfg_scale=scale, **settings, **options)


def expected(entry: dict[str, Any]) -> float:
    return entry["log_likelihood"] if "log_likelihood" in entry else -entry["nll"]


COUNTS = ("llada", "a2d_qwen3")
"""Families whose code draws a number of masks, rounded half to even."""

ALL = entries("llada", "dream", "smdm", "smdm_sink", "smdm_gate", "a2d_qwen3")


@pytest.mark.parametrize(("family", "entry"), ALL)
def test_reference_quirks_reproduce_the_original(family: str, entry: dict[str, Any]) -> None:
    got = run(family, entry, batch_size=entry["batch_size"], reference_quirks=True)
    assert got.value.tolist() == pytest.approx([expected(entry)], rel=1e-5)
    if got.method == "mc":
        # Two batches differ by a factor of three: a wrong random stream is seen here.
        losses = entry["loss_per_batch" if "loss_per_batch" in entry else "loss_per_batch_float64"]
        assert got.groups[0].tolist() == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(("family", "entry"), ALL)
def test_the_default_is_the_original_item_by_item(family: str, entry: dict[str, Any]) -> None:
    """An item's generator is the authors' stream for that item alone; canvases per forward do not matter.

    The authors of LLaDA round numbers of masks half to even, which is a setting.
    """
    strata: dict[str, Any] = {}
    if entry.get("nll_type", "mc") == "mc":
        strata = {"strata": entry["batch_size"]} | ({"rounding": "half_to_even"} if family in COUNTS else {})
    got = run(family, entry, batch_size=3, **strata)
    assert got.value.tolist() == pytest.approx([expected(entry)], rel=1e-5)


MC = [case for case in ALL if case.values[1].get("nll_type", "mc") == "mc"]


@pytest.mark.parametrize(("family", "entry"), MC)
def test_the_masks_are_the_originals(family: str, entry: dict[str, Any]) -> None:
    prompt, answer = entry.get("prompt", entry.get("prefix")), entry.get("answer", entry.get("target"))
    pair = Pair(torch.tensor(prompt), torch.tensor(answer))
    mask = json.loads((GOLDEN / family / "likelihood.json").read_text())["mask_token_id"]
    corruption: Any = {
        **dict.fromkeys(COUNTS, CountCorruption("half_to_even")),
        "dream": RateCorruption(1e-3, True, "both" if entry.get("log_type") == "union" else "answer"),
    }.get(family, RateCorruption())
    generator = torch.Generator().manual_seed(entry["seed"])
    stored = next(entry[key] for key in ("noisy_batches", "inputs", "model_inputs") if key in entry)
    for batch, rates in zip(stored, entry["p_mask_per_row"], strict=True):
        drawn = corruption.draw(pair, entry["batch_size"], generator)
        assert pair.tokens.masked_fill(drawn.masked, mask).tolist() == batch[: entry["batch_size"]]
        assert drawn.rate.tolist() == pytest.approx(rates, rel=1e-6)


SMDM = [case for case in ALL if "greedy_completion" in case.values[1]]


@pytest.mark.parametrize("quirks", [True, False])
@pytest.mark.parametrize(("family", "entry"), SMDM)
def test_greedy_completions_are_the_originals(family: str, entry: dict[str, Any], quirks: bool) -> None:
    model: PreTrainedModel = dlm_lens.load(GOLDEN / family)
    completion = entry["greedy_completion"]
    answers = [entry["target"], completion]
    got = dlm_lens.log_likelihood(
        model, entry["prefix"], answers, "greedy_completion", cfg_scale=entry["cfg"], reference_quirks=quirks
    )
    assert [ids.tolist() for ids in got.completions] == [completion, completion]
    assert got.is_greedy.tolist() == [entry["target"] == completion, True]
    assert got.value.tolist() == [-torch.inf, 0.0]
