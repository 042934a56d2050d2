"""Hiding the whole prompt makes the masked positions alike: what is written first is a tie, on every device."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_tokens
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 12, 7, 3], [8, 4, 2, 30, 11]]


@pytest.mark.parametrize("family", ["llada", "mmada", "sink_qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_the_prompt_the_masks_of_the_first_step_are_tied(family: str, dtype: torch.dtype) -> None:
    """A [MASK] that sees [MASK]s alone averages equal values, wherever it stands: rotation turns q and k, not v.

    So all positions propose the same token with the same probability, up to the rounding of the matrix products,
    which is another one on every device: a GPU that rounds differently writes another position first.
    """
    run = dl.denoise(
        tiny(family).to(dtype), PROMPTS, gen_length=8, steps=8, hooks=[mask_tokens("prompt")], logits="all"
    )
    confidence, proposals = run.confidence[0, :, 5:], run.proposals[0, :, 5:]
    assert (proposals == proposals[:, :1]).all()
    spread = float((confidence.amax(-1) / confidence.amin(-1) - 1).max())
    if dtype == torch.float64:
        # Stored as float32: rounding of float64 is below it, and of equals the earlier position is written.
        assert spread == 0
        assert run.unmasked[0].nonzero().tolist() == [[0, 5], [1, 5]]
    else:
        assert spread < 8 * torch.finfo(torch.float32).eps
    seen = dl.denoise(tiny(family).to(dtype), PROMPTS, gen_length=8, steps=8).confidence[0, :, 5:]
    assert float((seen.amax(-1) / seen.amin(-1) - 1).min()) > 1e-3


@pytest.mark.parametrize("family", ["llada", "mmada", "sink_qwen"])
def test_where_something_else_is_seen_nothing_is_tied(family: str) -> None:
    hidden = dl.denoise(tiny(family), PROMPTS, gen_length=8, steps=8, hooks=[mask_tokens(5, 9, 12, 8, 4, 2)])
    confidence = hidden.confidence[0, :, 5:]
    assert float((confidence.amax(-1) / confidence.amin(-1) - 1).min()) > 1e-4
