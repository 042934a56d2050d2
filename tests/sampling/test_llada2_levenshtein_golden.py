"""LLaDA2.2's sampler against a server's, canvas by canvas, over scripted logits.

The canvases of tests/golden/llada2_levenshtein were made by the decoder of FLX-OSS/FluxServe, which its authors
compare with the checkpoint's own code (decoders/levenshtein.py, 99b73a0a), over the logits of `scripted`. They do
not depend on a network's rounding.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "llada2_levenshtein" / "sampling.json").read_text())
MASK, DELETE, SPLIT = GOLDEN["mask_token_id"], GOLDEN["delete_token_id"], GOLDEN["split_token_id"]


def scripted(canvas: Tensor) -> Tensor:
    """Logits [..., position, 64] from each token, the one before it and the place, without equal ones in a row."""
    before = torch.nn.functional.pad(canvas[..., :-1], (1, 0))
    place = torch.arange(canvas.shape[-1])
    mixed = 7 * canvas + 3 * before + 5 * place
    values = (mixed[..., None] + 11 * torch.arange(64)) % 97
    logits = values / 97 * 40 * (1 + place / 50)[:, None]
    logits[..., MASK] = -torch.inf
    return logits


def model_of() -> Any:
    model = tiny("llada2", delete_token_id=DELETE, split_token_id=SPLIT)
    model.config.eos_token_id = None
    return model


CASES = {case["name"]: case for case in GOLDEN["cases"]}


@cache
def run(name: str, repeats: str = "least_confident", seed: int = 0) -> dl.DenoisingRun:
    case = CASES[name]

    def replace(_step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        return scripted(canvas)[:, : logits.shape[1]].to(logits)

    options = {"repeats": repeats, "seed": seed, **case["settings"]}
    return dl.denoise(model_of(), [case["prompt"]], on_logits=replace, **options)


@pytest.mark.parametrize("name", CASES)
def test_every_canvas_is_the_servers(name: str) -> None:
    found = run(name)
    assert found.canvases[:, 0].tolist() == CASES[name]["canvases"]
    assert found.masks_left.tolist() == [0]


def test_the_cases_delete_insert_and_repeat_themselves() -> None:
    """What the cases are for: without one of these they would compare less than they say."""
    deleted = inserted = 0
    for case in GOLDEN["cases"]:
        found = run(case["name"])
        written = (found.proposals != found.canvases[:-1]) & found.confidence.isfinite()
        deleted += int(((found.proposals == DELETE) & written).any())
        inserted += int(((found.proposals == SPLIT) & written).any())
    assert deleted >= 4
    assert inserted >= 4
    assert sum(case["repeats"] for case in GOLDEN["cases"]) >= 10
