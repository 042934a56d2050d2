"""A position that the canvas of a run never has is refused before the first pass, however late the hook acts."""

from typing import Any

import pytest
import torch

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
    steer,
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


class Watch:
    """Keeps, by step, the size of the last axis of an activation of the first layer, and where it is all zero."""

    layers = (0,)

    def __init__(self, site: str, axes: tuple[int, ...]) -> None:
        self.site, self.axes = site, axes
        self.sizes: list[int] = []
        self.zeros: list[list[int]] = []

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        zero = (tensor == 0).all(self.axes)
        self.sizes.append(len(zero))
        self.zeros.append(zero.nonzero().flatten().tolist())
        return tensor


@pytest.mark.parametrize(("family", "position"), [("causal", 7), ("sdar", 12)])
@pytest.mark.parametrize(
    "built",
    [
        lambda position: zero_value(position),
        lambda position: scale_attention(position, 50.0),
        lambda position: ablate("resid", position),
        lambda position: steer(torch.full((32,), 9.0), positions=position),
    ],
)
def test_a_position_that_is_written_later_is_edited_from_then_on(family: str, position: int, built: Any) -> None:
    """The first steps see a canvas that ends before it, on which the hook does nothing, as with `by_row`."""
    model, confidence = tiny(family), list[torch.Tensor]()
    for hooks in ([], [built(position)], [built(by_row([position]))]):
        found = dl.denoise(model, PROMPTS[:1], hooks=hooks, gen_length=9)
        confidence.append(found.confidence.nan_to_num(neginf=0.0))
    plain, named, of_row = confidence
    torch.testing.assert_close(named, of_row)
    torch.testing.assert_close(named[0], plain[0])
    assert float((named - plain).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("family", "sizes", "first"),
    [("llada", [13] * 8, 1), ("sdar", [8] * 3 + [12] * 4 + [13], 1), ("causal", list(range(5, 13)), 0)],
)
def test_the_last_position_of_a_canvas_that_grows_is_one(family: str, sizes: list[int], first: int) -> None:
    model = tiny(family)
    columns, states = Watch("pattern", (0, 1, 2)), Watch("resid", (0, 2))
    hooks = [mask_positions(12, stage="after"), at_steps(ablate("resid", -12, "zero"), [7])]
    dl.denoise(model, [PROMPTS[0]], gen_length=8, hooks=[*hooks, columns, states])
    assert columns.sizes == states.sizes == sizes
    # It is hidden from the step on at which the canvas has it; an AR run never reads its last token.
    assert columns.zeros == [[12] if size > 12 else [] for size in sizes]
    assert states.zeros == [[]] * 7 + [[first]]
    dl.denoise(model, [PROMPTS[0]], gen_length=8, hooks=[at_steps(ablate("resid", -12), [-1])])


def test_a_patch_is_checked_too() -> None:
    model = tiny("llada")
    source = captured(model, dl.denoise(model, PROMPTS, gen_length=8, seed=1), cache_steps=[0, 7])
    seen = passes(model)
    with pytest.raises(ValueError, match="position 13 is not there"):
        dl.denoise(model, PROMPTS, gen_length=8, hooks=[patch_from(source, 7, positions=[13])])
    assert not seen
