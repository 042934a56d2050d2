"""A position that the canvas of a run never has is refused before the first pass, however late the hook acts."""

from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.hooks import (
    ablate,
    at_progress,
    at_steps,
    by_row,
    keep_only,
    mask_positions,
    mask_random,
    patch_from,
    scale_attention,
    sink,
    zero_value,
)
from dlm_lens.hooks import capture as captured
from dlm_lens.testing import tiny

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]  # with 8 tokens of answer: 13 positions, 11 of the second row
HOOKS: dict[str, tuple[Any, str]] = {
    "mask": (mask_positions(13), "position 13 is not there; the model has 13 canvas positions"),
    "from the end": (mask_positions(0, -14), "position -14 is not there"),
    "sink": (zero_value(sink(0)), r"position sink\(0\) is not there; the model has 0 sink tokens"),
    "activation": (ablate("resid", [2, 40]), "position 40 is not there"),
    "row": (ablate("mlp_out", by_row([3], [11])), "position 11 is not there; row 1 has 11 positions"),
    "window": (keep_only([50], window=3), "position 50 is not there"),
    "control": (mask_random(like=mask_positions(77)), "position 77 is not there"),
    "scaled": (scale_attention([99], 2.0), "position 99 is not there"),
}


def passes(model: Any) -> list[int]:
    seen: list[int] = []
    model.get_decoder().register_forward_pre_hook(lambda module, args: seen.append(1))
    return seen


@pytest.mark.parametrize("family", ["llada", "sdar", "causal", "diffusion_gemma"])
@pytest.mark.parametrize("name", HOOKS)
def test_before_any_pass(family: str, name: str) -> None:
    hook, message = HOOKS[name]
    model = tiny(family)
    seen = passes(model)
    for late in (at_steps(hook, [-1]), at_progress(hook, (0.9, 1.0))):
        with pytest.raises(ValueError, match=message):
            dl.denoise(model, PROMPTS, gen_length=8, hooks=[late])
    assert not seen


@pytest.mark.parametrize("family", ["llada", "sdar", "causal"])
def test_the_last_position_of_a_canvas_that_grows_is_one(family: str) -> None:
    model = tiny(family)
    dl.denoise(model, [PROMPTS[0]], gen_length=8, hooks=[mask_positions(12), at_steps(ablate("resid", -12), [-1])])


def test_a_patch_is_checked_too() -> None:
    model = tiny("llada")
    source = captured(model, dl.denoise(model, PROMPTS, gen_length=8, seed=1), cache_steps=[0, 7])
    seen = passes(model)
    with pytest.raises(ValueError, match="position 13 is not there"):
        dl.denoise(model, PROMPTS, gen_length=8, hooks=[patch_from(source, 7, positions=[13])])
    assert not seen
