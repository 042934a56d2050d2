"""Hooks in float16, whose least number is 6e-8 and whose greatest 65,504."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, scale_attention, steer
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9"]
HIDDEN = torch.tensor([[[[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]]])


def test_a_renormalised_row_of_zeros_stays_zero() -> None:
    for hook in (
        mask_positions(0, stage="after", renormalise=True),
        scale_attention([0], 1e-9, stage="after", renormalise=True),
    ):
        found = hook(HIDDEN.half())
        assert found.dtype == torch.float16
        # Half precision rounds a third to 3 in 10,000.
        torch.testing.assert_close(found.float(), hook(HIDDEN), atol=3e-4, rtol=0)
    zeros = torch.zeros(1, 1, 2, 4).half()
    assert scale_attention([1], 2.0, stage="after", renormalise=True)(zeros).equal(zeros)


@pytest.mark.parametrize(
    "hooks",
    [
        [scale_attention([-1], 2.0, stage="after", renormalise=True)],
        [mask_positions(i, stage="after", renormalise=True) for i in (-1, -2)],
    ],
    ids=["scaled", "masked twice"],
)
def test_padded_queries_of_a_causal_model_have_no_pattern_and_do_no_harm(hooks: list[Any]) -> None:
    model = tiny("causal").half()
    settings: dict[str, Any] = {"gen_length": 4, "seed": 0, "hooks": hooks}
    together = dl.denoise(model, PROMPTS, **settings)
    assert together.answers == [dl.denoise(model, [prompt], **settings).answers[0] for prompt in PROMPTS]
    assert dl.bridge(model).denoise(PROMPTS, **settings).tokens.equal(together.tokens)


@pytest.mark.parametrize(("size", "scale"), [(1e-8, 1e8), (3e-7, 1e7), (1e5, 1e-5)])
def test_a_direction_is_scaled_before_it_is_rounded(size: float, scale: float) -> None:
    torch.manual_seed(0)
    activation, direction = torch.zeros(1, 3, 32).half(), size * torch.randn(32)
    added = steer(direction, scale=scale)(activation)
    assert added.dtype == torch.float16
    torch.testing.assert_close(added[0, 0].float(), scale * direction, atol=1e-4, rtol=2e-3)  # half precision
